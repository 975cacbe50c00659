"""Collect loaded elements: ranges of a shard, each written once all its elements have been read.

Items of a file have the order of the elements of a shard, so that few ranges are incomplete at a time, however large
the shard is.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from npuzero.checkpoint.layout.parts import ITEM_BYTES, BoxLocation, SlotPiece
from npuzero.checkpoint.source import ReadRequest

#: Elements of a range: full blocks of moments, and as many elements as an item has.
RANGE = ITEM_BYTES // 4

#: Pieces of tensors in a shard, each with the key that its tensor is stored under.
Stored = Sequence[tuple[str, SlotPiece]]


class LoadTarget:
    """Collect the elements of a range of a shard in a buffer, and write them when the range is complete.

    Args:
        idle: free buffers; the target takes one and gives it back.
        begin: of the shard, in elements of the flat parameter.
        own: the range.
        write: gets the values: [n] on the host, zeros for elements that are not stored.
    """

    def __init__(
        self, idle: list[Tensor], begin: int, own: slice, dtype: torch.dtype, write: Callable[[Tensor], None]
    ) -> None:
        self._idle = idle
        self._begin, self._end = begin + own.start, begin + own.stop
        self._dtype = dtype
        self._write = write
        self._left = 0
        self._values: Tensor | None = None

    def wanted(self, stored: Stored) -> list[ReadRequest]:
        """Return the read requests of the range; without any, zeros are written at once."""
        found: list[ReadRequest] = []
        for key, piece in stored:
            for site in piece.sites_in(self._begin, self._end):
                found.append(ReadRequest(key, site.box, partial(self._part, site), self._landed))
        self._left = len(found)
        if not found:
            self._all()
            self._finish()
        return found

    def _all(self) -> Tensor:
        if self._values is None:
            nbytes = (self._end - self._begin) * self._dtype.itemsize
            at = next((i for i, idle in enumerate(self._idle) if idle.numel() >= nbytes), None)
            memory = torch.empty(nbytes, dtype=torch.uint8) if at is None else self._idle.pop(at)
            self._memory, self._values = memory, memory[:nbytes].view(self._dtype).zero_()
        return self._values

    def _part(self, site: BoxLocation) -> Tensor:
        begin, end = site.range
        return site.of(self._all()[begin - self._begin : end - self._begin])

    def _landed(self) -> None:
        self._left -= 1
        if not self._left:
            self._finish()

    def _finish(self) -> None:
        self._write(self._all())
        self._values = None
        self._idle.append(self._memory)
