"""The update of what is far, as moves: chunk after chunk to the host, updated there, and back."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import torch

from npuzero.plan.filed import filed_bytes
from npuzero.plan.flats import Kind
from npuzero.plan.moves import Buffer, Copy, Give, Move, Repeat, Take, Update
from npuzero.plan.placement import Memory
from npuzero.plan.report import FROM_DISK, TO_DEVICE, TO_DISK, TO_HOST
from npuzero.plan.tiers import (
    FAR_CHUNK_BYTES,
    RING_SLOTS,
    Part,
    Sections,
    divide,
    far_block_bytes,
    sections,
    whole_pages,
)


@dataclass(frozen=True)
class _Size:
    """Give what a chunk takes: elements, bytes by section, those of parameters that come to the host; and on NVMe the
    extent of parameters, and what of them the update needs.
    """

    numel: int
    sections: Sections
    fetched: int
    filed: int
    read: int


@dataclass
class _Sizes:
    """Add up chunks; what equal pieces take is worked out once."""

    kinds: Sequence[Kind]
    moments: int
    on_device: bool
    _known: dict[tuple[int, int], _Size] = field(default_factory=dict)

    def chunk(self, parts: Iterable[Part]) -> _Size:
        pieces = [self._piece(self.kinds[part.shard], part.end - part.begin) for part in parts]
        if len(pieces) == 1:
            return pieces[0]
        summed = Sections(*(sum(each) for each in zip(*(piece.sections for piece in pieces), strict=True)))
        numel, fetched, filed = (
            sum(each) for each in zip(*((p.numel, p.fetched, p.filed) for p in pieces), strict=True)
        )
        return _Size(numel, summed, fetched, filed, filed if any(piece.read for piece in pieces) else 0)

    def _piece(self, kind: Kind, numel: int) -> _Size:
        key = id(kind), numel
        if key not in self._known:
            taken = sections(kind.plan, kind.dtype, numel, self.moments, self.on_device)
            rounded = kind.plan.precision.keeps_fp32_masters(kind.dtype)
            fetched, filed = 0 if rounded else taken.parameters, filed_bytes(kind, numel)
            self._known[key] = _Size(numel, taken, fetched, filed, 0 if rounded else filed)
        return self._known[key]


def far_update(runs: Sequence[tuple[Kind, int]], chunk_bytes: int, moments: int, on_device: bool) -> Iterator[Move]:
    """Yield the moves of an update of flats, given as runs of equal ones in order, of which something is far.

    What is near of them is updated on the device, for which gradients come from their home. Where updates are delayed
    the parameters that the last one made come first.

    Args:
        chunk_bytes: of masters and moments in a chunk; 0: as many as is usual.
        moments: of an element.
        on_device: the device updates what is far, too, and reads it in the host's memory.
    """
    yield from (Copy(TO_DEVICE, k.far * k.dtype.itemsize, n) for k, n in runs if k.plan.lag)
    near = [(Buffer(Memory.DEVICE, "gradients", k.near, torch.float32), n) for k, n in runs if k.homed and k.near]
    for buffer, count in near:
        yield from (Take(buffer, count), Copy(TO_DEVICE, buffer.nbytes, count))
    yield from (Give(buffer, count) for buffer, count in near)
    yield from _stream(runs, chunk_bytes, moments, on_device)


def _stream(runs: Iterable[tuple[Kind, int]], chunk_bytes: int, moments: int, on_device: bool) -> Iterator[Move]:
    kinds = [kind for kind, count in runs if kind.far for _ in range(count)]
    shards = ((kind.near, kind.near + kind.far, far_block_bytes(kind.plan.precision, kind.dtype)) for kind in kinds)
    sizes = _Sizes(kinds, moments, on_device)
    chunks = [sizes.chunk(parts) for parts in divide(shards, chunk_bytes or FAR_CHUNK_BYTES)]
    if not chunks:
        return
    distinct = set(chunks)
    slots = [whole_pages(max(section)) for section in zip(*(size.sections for size in distinct), strict=True)]
    # They stay from step to step, as what a pool lends does.
    ring = [
        (Buffer(Memory.HOST, "buffers", nbytes, torch.uint8, pool=("ring", ())), min(RING_SLOTS, len(chunks)))
        for nbytes in slots
        if nbytes
    ]
    yield from (Take(buffer, count) for buffer, count in ring)
    for size, equal in itertools.groupby(chunks):
        yield Repeat(sum(1 for _ in equal), tuple(_chunk(size)))
    yield from (Give(buffer, count) for buffer, count in ring)


def _chunk(size: _Size) -> Iterator[Move]:
    """Yield what is done to one chunk."""
    gradients, parameters, masters, moments = size.sections
    record = whole_pages(masters) + whole_pages(moments)
    moves = (
        Copy(FROM_DISK, record + size.read),
        Copy(TO_HOST, gradients + size.fetched),
        Update(size.numel),
        Copy(TO_DEVICE, parameters),
        Copy(TO_DISK, record + size.filed),
    )
    return (move for move in moves if not isinstance(move, Copy) or move.nbytes)
