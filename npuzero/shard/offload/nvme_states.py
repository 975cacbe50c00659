"""Store states on NVMe: one extent per chunk, read and written as a unit."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import NamedTuple

import torch

from npuzero.device import AsyncHandle
from npuzero.errors import NpuZeroError
from npuzero.memory import BufferRing, MemorySpaces
from npuzero.ops.storage import stored_numel
from npuzero.plan import RING_SLOTS, STATE_ALIGNMENT, Memory, round_up_pages
from npuzero.shard.offload.chunks import UpdateChunk
from npuzero.shard.offload.host_states import Fields, StateStore, Views
from npuzero.shard.offload.nvme_extents import ExtentSnapshot, FileExtents
from npuzero.shard.state.snapshot import KeptPart


class _StateRange(NamedTuple):
    """Locate a state of a piece in its chunk's extent, in bytes."""

    piece: int
    name: str
    dtype: torch.dtype
    begin: int
    end: int


class NvmeStateStore(StateStore):
    """Store states in files; they move through a ring of host buffers.

    Opening a part outside of an update reads its chunk's extent into the ring. Changes there are written to disk when
    another extent is opened or an update begins.

    Args:
        label: the part of the training state: ``"states"`` or ``"parameters"``.
        alignment: each state of a piece begins at a multiple of this many bytes in its extent.
    """

    def __init__(
        self,
        chunks: Sequence[UpdateChunk],
        fields: Fields,
        quiet: Callable[[], None],
        spaces: MemorySpaces,
        label: str = "states",
        alignment: int = STATE_ALIGNMENT,
    ) -> None:
        super().__init__(chunks, fields, quiet)
        self._states = [_lay_out_states(chunk, fields, alignment) for chunk in chunks]
        lengths = [round_up_pages(states[-1].end) if states else 0 for states in self._states]
        self._extents = FileExtents(spaces.disk, lengths)
        self._keeping: ExtentSnapshot | None = None
        spaces[Memory.NVME].count(label, sum(s.end - s.begin for states in self._states for s in states))
        self._slots = min(RING_SLOTS, len(chunks))
        self._ring = BufferRing(spaces.host, max(lengths), self._slots)
        self._foreseen: dict[int, tuple[int, AsyncHandle]] = {}  # by slot: the chunk prefetched for the next update
        self._opened: int | None = None
        self._written = False

    def extent_bytes(self, k: int) -> int:
        return self._extents.lengths[k]

    def settle(self) -> None:
        if self._opened is not None and self._written:
            self.store(self._opened, 0).wait()
        self._opened, self._written = None, False
        self._extents.settle()

    def fetch(self, k: int, turn: int) -> AsyncHandle:
        chunk, handle = self._foreseen.pop(turn % self._slots, (None, None))
        if handle is not None and chunk == k:
            return handle
        _wait_for_slot(handle)
        return self._extents.read(k, self._ring.slot(turn))

    def foresee(self, k: int, turn: int) -> None:
        slot = turn % self._slots
        if self._foreseen.get(slot, (None,))[0] != k:
            self._foreseen[slot] = k, self.fetch(k, turn)

    def views(self, k: int, turn: int) -> list[Views]:
        slot = self._ring.slot(turn)
        found: list[dict[str, torch.Tensor]] = [{} for _ in self._chunks[k].pieces]
        for state in self._states[k]:
            found[state.piece][state.name] = slot[state.begin : state.end].view(state.dtype)
        return list(found)

    def store(self, k: int, turn: int) -> AsyncHandle:
        return self._extents.write(k, self._ring.slot(turn))

    def opened(self, k: int, write: bool) -> list[Views]:
        for _, handle in self._foreseen.values():
            _wait_for_slot(handle)
        self._foreseen.clear()  # a write makes prefetched chunks stale, and this uses slot 0
        if self._opened != k:
            self.settle()
            self.fetch(k, 0).wait()
            self._opened = k
        self._written = self._written or write
        return self.views(k, 0)

    def kept(self, name: str, k: int, i: int) -> KeptPart:
        self._quiet()
        self.settle()
        if self._keeping is None or self._keeping.over:
            self._keeping = ExtentSnapshot(self._extents)
        state = next(state for state in self._states[k] if (state.piece, state.name) == (i, name))
        return self._keeping.keep(k, state.begin, state.end, state.dtype)


def _wait_for_slot(handle: AsyncHandle | None) -> None:
    """Wait until the pending read into a slot ends. Ignore its error: a later fetch raises it again."""
    if handle is not None:
        with suppress(NpuZeroError):
            handle.wait()


def _lay_out_states(chunk: UpdateChunk, fields: Fields, alignment: int) -> list[_StateRange]:
    """Lay out the states of a chunk's pieces in its extent, each at a multiple of ``alignment``."""
    states: list[_StateRange] = []
    begin = 0
    for i, piece in enumerate(chunk.pieces):
        for name, dtype in fields.get(piece.flat, {}).items():
            end = begin + stored_numel(piece.end - piece.begin, dtype) * dtype.itemsize
            states.append(_StateRange(i, name, dtype, begin, end))
            begin = -(-end // alignment) * alignment
    return states
