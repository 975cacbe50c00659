"""A state of one flat's shard, spread over the memories: read and written by ranges, wherever each part of it lies."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from npuzero.ops import storage
from npuzero.shard.layout import overlap


class Part(NamedTuple):
    """Describe the elements ``[begin, end)`` of the shard.

    Attributes:
        open: brings them here as they are stored, in a tensor that begins with the part's first element; what is
            written there lasts if ``open`` was told so. It may be gone once another part is opened.
    """

    begin: int
    end: int
    open: Callable[[bool], Tensor]


class Reach(NamedTuple):
    """Describe what a part has of a range.

    Attributes:
        here: as a slice of the range.
        stored, numel: the part, and its elements.
        there: as a slice of the part.
    """

    here: slice
    stored: Tensor
    numel: int
    there: slice


class Spread:
    """Hold one state in parts, which are whole blocks of moments each, but for the last.

    Args:
        dtype: in which it is stored.
        parts: ascending, side by side.
    """

    def __init__(self, dtype: torch.dtype, parts: list[Part]) -> None:
        self.dtype = dtype
        self._parts = parts
        self._one: Tensor | None = None  # all of it, where it is one tensor that stays

    @staticmethod
    def whole(tensor: Tensor, numel: int) -> Spread:
        """Return a state of ``numel`` elements that is one tensor."""
        spread = Spread(tensor.dtype, [Part(0, numel, lambda _: tensor)])
        spread._one = tensor
        return spread

    def extended(self, further: Spread) -> Spread:
        """Return this state with what follows it."""
        return Spread(self.dtype, [part for part in (*self._parts, *further._parts) if part.begin < part.end])

    def over(self, own: slice, write: bool = False) -> Iterator[Reach]:
        """Yield, part by part, what lies in the range ``own``; use each before the next one is asked for."""
        for part in self._parts:
            begin, end = overlap((own.start, own.stop), (part.begin, part.end))
            if begin < end:
                here = slice(begin - own.start, end - own.start)
                yield Reach(here, part.open(write), part.end - part.begin, slice(begin - part.begin, end - part.begin))

    def read(self, own: slice, *, signed: bool = True) -> Tensor:
        """Return a range as float32, maybe a copy; of codes one that begins with a block."""
        if self._one is not None and self.dtype == torch.float32:
            return self._one[own]
        read = [storage.read(r.stored, r.numel, r.there, signed=signed) for r in self.over(own)]
        return torch.cat([some.to(read[0].device) for some in read]) if read else torch.empty(0)

    def write(self, own: slice, values: Tensor, *, signed: bool = True) -> None:
        """Replace a range, whole blocks but for its end, by float32 ``values``: what :meth:`read` gave comes back."""
        for reach in self.over(own, write=True):
            mine = values[reach.here].to(reach.stored.device)
            storage.write(mine, reach.stored, reach.numel, reach.there, signed=signed)

    def beside(self, own: slice, other: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield, part by part of a range, what ``other`` (of all elements) has of it, brought to where what is stored
        lies; and that, to be read and written, where each is stored alone, not in codes.
        """
        for reach in self.over(own, write=True):
            yield other[own][reach.here].to(reach.stored.device), reach.stored[reach.there]

    def clear(self, own: slice, where: Tensor | None = None) -> None:
        """Zero a range, or those of its elements for which ``where`` is true."""
        for reach in self.over(own, write=True):
            part = reach.stored[reach.there]
            part.zero_() if where is None else part.masked_fill_(where[reach.here].to(part.device), 0)
