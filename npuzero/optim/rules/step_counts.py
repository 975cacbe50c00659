"""How many steps were taken, counted on the device: no operation waits for it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterable, Sequence

import torch
from torch import Tensor


class TakenSteps:
    """Count on the device how often each of some parameters was updated.

    Those that were updated together all along share one count, which stays where it is and is added to in place, so
    that a captured graph goes on counting.

    Attributes:
        counts: by key of a parameter its count, () float on the device.
    """

    def __init__(self) -> None:
        self.counts: dict[Hashable, Tensor] = {}
        self._sharing: Counter[int] = Counter()  # by id of a count, how many parameters it is the count of
        self._new: dict[tuple[float, torch.device, torch.dtype], Tensor] = {}  # counts that nothing was added to yet

    def begin(self, key: Hashable, step: float, device: torch.device, dtype: torch.dtype = torch.float64) -> Tensor:
        """Count here from now on a parameter that was updated ``step`` times; return its count."""
        self.forget(key)
        new = (float(step), device, dtype)
        if new not in self._new:
            self._new[new] = torch.full((), step, dtype=dtype, device=device)
        self._set(key, self._new[new])
        return self.counts[key]

    def forget(self, key: Hashable) -> None:
        """Stop counting a parameter, if it is counted here."""
        count = self.counts.pop(key, None)
        if count is not None:
            self._sharing[id(count)] -= 1

    def part(self, used: Sequence[Hashable]) -> None:
        """Give those in ``used``, which are about to be updated, counts that they share with no others."""
        here = Counter(id(self.counts[key]) for key in used)
        parting = {count for count, members in here.items() if members < self._sharing[count]}
        parted: dict[int, Tensor] = {}
        for key in used if parting else ():
            count = self.counts[key]
            if id(count) in parting:
                self.forget(key)
                self._set(key, parted.setdefault(id(count), count.clone()))

    def take(self, used: Iterable[Hashable], skip: Tensor | None) -> None:
        """Count an update of those in ``used``, unless there is a ``skip`` ([1] float32) that is not zero."""
        for count in {id(self.counts[key]): self.counts[key] for key in used}.values():
            count.add_(1 if skip is None else skip[0].to(count.device) == 0)
        self._new.clear()

    def _set(self, key: Hashable, count: Tensor) -> None:
        self.counts[key] = count
        self._sharing[id(count)] += 1
