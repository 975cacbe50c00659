"""Parameters that rest on disks: chunk by chunk for the update, flat by flat for who gathers them.

A chunk's extent has its pieces side by side, each on pages of its own, so that those of one flat are read without the
others. What never trains is in no chunk of the update, and has some of its own behind.
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
    """Name elements of a flat's resting shard, and the pages that have them.

    Attributes:
        begin, end: of the shard.
        at, nbytes: of what is read of the flat, in bytes.
        chunk, first: its extent, and from which byte of it on.
    """

    begin: int
    end: int
    at: int
    nbytes: int
    chunk: int
    first: int


class NvmeParameterStore(NvmeStateStore):
    """Hold the resting shards of ``flats`` in a store.

    Attributes:
        versions: by flat, how often anything of it was written.
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
        """Tell whether an update needs what is there; not where it is written anew from float32 masters."""
        return self._read[k] or not every

    def settle(self) -> None:
        """Bring what was written outside of updates to the disk: an update begins, or the program reads beside it."""
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
        """Return what is where in what is read of a flat: its pieces, side by side."""
        found: list[ShardPages] = []
        for k, i in self._places[flat]:
            piece = self._chunks[k].pieces[i]
            at = found[-1].at + found[-1].nbytes if found else 0
            begin = next(state.begin for state in self._states[k] if state.piece == i)
            nbytes = round_up_pages((piece.end - piece.begin) * flat.dtype.itemsize)
            found.append(ShardPages(piece.begin, piece.end, at, nbytes, k, begin))
        return found

    def read_bytes(self, flat: FlatParameter) -> int:
        """Return what :meth:`read` reads."""
        return sum(place.nbytes for place in self.places(flat))

    def read(self, flat: FlatParameter, buffer: Tensor, handles: list[AsyncHandle]) -> None:
        """Begin to read the shard of ``flat``, which is updated no more, into a buffer of so many bytes.

        Args:
            handles: gets those of the reads, as each begins.
        """
        self.settle()
        for place in self.places(flat):
            part = buffer[place.at : place.at + place.nbytes]
            handles.append(self._extents.read_part(place.chunk, place.first, part))

    def _flats_of(self, chunk: UpdateChunk) -> list[FlatParameter]:
        return [piece.flat for piece in chunk.pieces if self.has(piece.flat)]
