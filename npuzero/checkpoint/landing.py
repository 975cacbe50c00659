"""Where what is loaded lands: ranges of a shard, each written once all of it has been read.

Items of a file follow each other as the elements of a shard do, so that few ranges wait for the rest of theirs at a
time, whatever the size of the shard.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from npuzero.checkpoint.layout.parts import ITEM_BYTES, BoxLocation, SlotPiece
from npuzero.checkpoint.source import ReadRequest

#: Elements of a range: whole blocks of moments, and as many as an item has.
RANGE = ITEM_BYTES // 4

#: Pieces of tensors that are in a shard, and under which key each tensor is stored.
Stored = Sequence[tuple[str, SlotPiece]]


class LoadTarget:
    """Gather the elements of a range of a shard in a buffer, which it has while they come.

    Args:
        idle: buffers, taken from and given back to.
        begin: of the shard, in elements of the flat.
        own: the range.
        write: gets the values: [n] on the host, zeros where nothing is stored.
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
        """Return what is to be read; where nothing is, zeros are written."""
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
