"""Store parameters on NVMe: updated by chunk, read by flat for R1.

In a chunk's extent each piece starts on a page, so one flat is read without its neighbours. Frozen parameters are in no
chunk of the update; separate chunks for them follow the update's.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Sequence
from typing import NamedTuple

from torch import Tensor

from npuzero.device import AsyncHandle
from npuzero.memory import MemorySpaces
from npuzero.plan import PAGE_BYTES, round_up_pages
from npuzero.shard.offload.chunks import UpdateChunk
from npuzero.shard.offload.host_states import Views
from npuzero.shard.offload.nvme_states import NvmeStateStore
from npuzero.shard.state.flat_parameter import PARAMETERS, FlatParameter


class ShardPages(NamedTuple):
    """Locate elements of a flat's local shard on disk.

    Attributes:
        begin, end: range of elements in the shard.
        at, nbytes: range in the buffer that the flat is read into, in bytes.
        chunk, first: the extent, and the first byte in it.
    """

    begin: int
    end: int
    at: int
    nbytes: int
    chunk: int
    first: int


class NvmeParameterStore(NvmeStateStore):
    """Store the local parameter shards of ``flats`` on NVMe.

    Attributes:
        versions: number of writes so far, by flat.
    """

    def __init__(
        self,
        chunks: Sequence[UpdateChunk],
        flats: Sequence[FlatParameter],
        quiet: Callable[[], None],
        spaces: MemorySpaces,
    ) -> None:
        fields = {flat: {PARAMETERS: flat.dtype} for flat in flats}
        super().__init__(chunks, fields, quiet, spaces, label="parameters", alignment=PAGE_BYTES)
        self.versions: Counter[FlatParameter] = Counter()
        self._settling = threading.Lock()
        self._read = [any(flat.masters != "fp32" for flat in self._flats_of(chunk)) for chunk in chunks]

    def reads(self, k: int, every: bool) -> bool:
        """Return whether the update must fetch chunk ``k``; not if float32 masters rewrite all of it."""
        return self._read[k] or not every

    def settle(self) -> None:
        """Write changes made outside of updates to the disk: an update begins, or a unit is read."""
        with self._settling:
            super().settle()

    def store(self, k: int, turn: int) -> AsyncHandle:
        self.versions.update(self._flats_of(self._chunks[k]))
        return super().store(k, turn)

    def opened(self, k: int, write: bool) -> list[Views]:
        if write:
            self.versions.update(self._flats_of(self._chunks[k]))
        return super().opened(k, write)

    def places(self, flat: FlatParameter) -> list[ShardPages]:
        """Return the location of each piece of a flat, on disk and in the buffer of :meth:`read`."""
        found: list[ShardPages] = []
        for k, i in self._places[flat]:
            piece = self._chunks[k].pieces[i]
            at = found[-1].at + found[-1].nbytes if found else 0
            begin = next(state.begin for state in self._states[k] if state.piece == i)
            nbytes = round_up_pages((piece.end - piece.begin) * flat.dtype.itemsize)
            found.append(ShardPages(piece.begin, piece.end, at, nbytes, k, begin))
        return found

    def read_bytes(self, flat: FlatParameter) -> int:
        """Return the number of bytes that :meth:`read` reads."""
        return sum(place.nbytes for place in self.places(flat))

    def read(self, flat: FlatParameter, buffer: Tensor, handles: list[AsyncHandle]) -> None:
        """Start to read the shard of ``flat`` into ``buffer``; no update of it is in flight.

        Args:
            buffer: :meth:`read_bytes` bytes.
            handles: receives the handle of each read as it starts.
        """
        self.settle()
        for place in self.places(flat):
            part = buffer[place.at : place.at + place.nbytes]
            handles.append(self._extents.read_part(place.chunk, place.first, part))

    def _flats_of(self, chunk: UpdateChunk) -> list[FlatParameter]:
        return [piece.flat for piece in chunk.pieces if self.has(piece.flat)]
