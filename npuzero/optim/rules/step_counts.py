"""Step counts on the device: no operation makes the host wait."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterable, Sequence

import torch
from torch import Tensor


class TakenSteps:
    """Count on the device the updates of each parameter.

    Parameters that were always updated together share one count. It is incremented in place at a fixed address, so that
    a captured graph continues to count.

    Attributes:
        counts: the count of each parameter by its key, () float on the device.
    """

    def __init__(self) -> None:
        self.counts: dict[Hashable, Tensor] = {}
        self._sharing: Counter[int] = Counter()  # by id of a count: the number of parameters that share it
        self._new: dict[tuple[float, torch.device, torch.dtype], Tensor] = {}  # counts not incremented yet

    def begin(self, key: Hashable, step: float, device: torch.device, dtype: torch.dtype = torch.float64) -> Tensor:
        """Start to count a parameter that was updated ``step`` times so far; return its count."""
        self.forget(key)
        new = (float(step), device, dtype)
        if new not in self._new:
            self._new[new] = torch.full((), step, dtype=dtype, device=device)
        self._set(key, self._new[new])
        return self.counts[key]

    def forget(self, key: Hashable) -> None:
        """Stop counting a parameter, if it is counted."""
        count = self.counts.pop(key, None)
        if count is not None:
            self._sharing[id(count)] -= 1

    def part(self, used: Sequence[Hashable]) -> None:
        """Split counts before an update: the parameters in ``used`` must not share a count with parameters outside."""
        here = Counter(id(self.counts[key]) for key in used)
        parting = {count for count, members in here.items() if members < self._sharing[count]}
        parted: dict[int, Tensor] = {}
        for key in used if parting else ():
            count = self.counts[key]
            if id(count) in parting:
                self.forget(key)
                self._set(key, parted.setdefault(id(count), count.clone()))

    def take(self, used: Iterable[Hashable], skip: Tensor | None) -> None:
        """Count an update of the parameters in ``used``, unless ``skip`` ([1] float32) is given and nonzero."""
        for count in {id(self.counts[key]): self.counts[key] for key in used}.values():
            count.add_(1 if skip is None else skip[0].to(count.device) == 0)
        self._new.clear()

    def _set(self, key: Hashable, count: Tensor) -> None:
        self.counts[key] = count
        self._sharing[id(count)] += 1
