"""Moves of the update of offloaded states: each chunk is copied to the host, updated there, and copied back."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import torch

from npuzero.plan.prediction.report import FROM_DISK, TO_DEVICE, TO_DISK, TO_HOST
from npuzero.plan.sizes.flat_sizes import FlatKind
from npuzero.plan.sizes.memory_tiers import (
    FAR_CHUNK_BYTES,
    RING_SLOTS,
    RingSections,
    TierPart,
    divide_shards,
    offloaded_block_bytes,
    ring_section_bytes,
    round_up_pages,
)
from npuzero.plan.sizes.nvme_layout import nvme_shard_bytes
from npuzero.plan.table.placement import Memory
from npuzero.plan.table.step_moves import (
    AllocateBuffer,
    CopyBytes,
    FreeBuffer,
    HostUpdate,
    Move,
    RepeatMoves,
    StepBuffer,
)


@dataclass(frozen=True)
class _ChunkSize:
    """Hold the sizes of a chunk.

    Attributes:
        numel: elements.
        sections: bytes by ring section.
        fetched: bytes of parameters copied to the host.
        filed, read: bytes of the parameters' extent on NVMe, and the bytes of it that the update reads.
    """

    numel: int
    sections: RingSections
    fetched: int
    filed: int
    read: int


@dataclass
class _ChunkSizes:
    """Compute chunk sizes; equal pieces are computed once."""

    kinds: Sequence[FlatKind]
    moments: int
    on_device: bool
    _known: dict[tuple[int, int], _ChunkSize] = field(default_factory=dict)

    def chunk(self, parts: Iterable[TierPart]) -> _ChunkSize:
        pieces = [self._piece(self.kinds[part.shard], part.end - part.begin) for part in parts]
        if len(pieces) == 1:
            return pieces[0]
        summed = RingSections(*(sum(each) for each in zip(*(piece.sections for piece in pieces), strict=True)))
        numel, fetched, filed = (
            sum(each) for each in zip(*((p.numel, p.fetched, p.filed) for p in pieces), strict=True)
        )
        return _ChunkSize(numel, summed, fetched, filed, filed if any(piece.read for piece in pieces) else 0)

    def _piece(self, kind: FlatKind, numel: int) -> _ChunkSize:
        key = id(kind), numel
        if key not in self._known:
            taken = ring_section_bytes(kind.plan, kind.dtype, numel, self.moments, self.on_device)
            rounded = kind.plan.precision.keeps_fp32_masters(kind.dtype)
            fetched, filed = 0 if rounded else taken.parameters, nvme_shard_bytes(kind, numel)
            self._known[key] = _ChunkSize(numel, taken, fetched, filed, 0 if rounded else filed)
        return self._known[key]


def offloaded_update_moves(
    runs: Sequence[tuple[FlatKind, int]], chunk_bytes: int, moments: int, on_device: bool
) -> Iterator[Move]:
    """Yield the moves of an update of flat parameters with offloaded states, given as runs of equal ones in order.

    States on the device are updated there, with gradients copied from the host. A delayed update first copies the
    parameters of the previous update to the device.

    Args:
        chunk_bytes: bytes of masters and moments per chunk; 0: the default.
        moments: moments per element.
        on_device: whether the device updates offloaded states, reading them in host memory.
    """
    yield from (CopyBytes(TO_DEVICE, k.far * k.dtype.itemsize, n) for k, n in runs if k.plan.lag)
    near = [(StepBuffer(Memory.DEVICE, "gradients", k.near, torch.float32), n) for k, n in runs if k.homed and k.near]
    for buffer, count in near:
        yield from (AllocateBuffer(buffer, count), CopyBytes(TO_DEVICE, buffer.nbytes, count))
    yield from (FreeBuffer(buffer, count) for buffer, count in near)
    yield from _chunked_update_moves(runs, chunk_bytes, moments, on_device)


def _chunked_update_moves(
    runs: Iterable[tuple[FlatKind, int]], chunk_bytes: int, moments: int, on_device: bool
) -> Iterator[Move]:
    kinds = [kind for kind, count in runs if kind.far for _ in range(count)]
    shards = (
        (kind.near, kind.near + kind.far, offloaded_block_bytes(kind.plan.precision, kind.dtype)) for kind in kinds
    )
    sizes = _ChunkSizes(kinds, moments, on_device)
    chunks = [sizes.chunk(parts) for parts in divide_shards(shards, chunk_bytes or FAR_CHUNK_BYTES)]
    if not chunks:
        return
    distinct = set(chunks)
    slots = [round_up_pages(max(section)) for section in zip(*(size.sections for size in distinct), strict=True)]
    # Rings are kept from step to step, as pooled buffers are.
    ring = [
        (StepBuffer(Memory.HOST, "buffers", nbytes, torch.uint8, pool=("ring", ())), min(RING_SLOTS, len(chunks)))
        for nbytes in slots
        if nbytes
    ]
    yield from (AllocateBuffer(buffer, count) for buffer, count in ring)
    for size, equal in itertools.groupby(chunks):
        yield RepeatMoves(sum(1 for _ in equal), tuple(_chunk_moves(size)))
    yield from (FreeBuffer(buffer, count) for buffer, count in ring)


def _chunk_moves(size: _ChunkSize) -> Iterator[Move]:
    """Yield the moves of one chunk."""
    gradients, parameters, masters, moments = size.sections
    record = round_up_pages(masters) + round_up_pages(moments)
    moves = (
        CopyBytes(FROM_DISK, record + size.read),
        CopyBytes(TO_HOST, gradients + size.fetched),
        HostUpdate(size.numel),
        CopyBytes(TO_DEVICE, parameters),
        CopyBytes(TO_DISK, record + size.filed),
    )
    return (move for move in moves if not isinstance(move, CopyBytes) or move.nbytes)
