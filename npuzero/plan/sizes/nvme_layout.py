"""Parameters that rest on NVMe: what of each flat and chunk lies there, and the rings of the host it goes through."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from npuzero.plan.sizes.flat_sizes import FlatKind
from npuzero.plan.sizes.memory_tiers import (
    FAR_CHUNK_BYTES,
    READ_SLOTS,
    RING_SLOTS,
    divide_shards,
    offloaded_block_bytes,
    round_up_pages,
)
from npuzero.plan.table.placement import Memory
from npuzero.plan.table.precision import MOMENT_BLOCK
from npuzero.plan.table.step_moves import StepBuffer

#: Runs of equal flats, in order: the kind and how many.
Runs = Sequence[tuple[FlatKind, int]]


def nvme_shard_bytes(kind: FlatKind, numel: int) -> int:
    """Return what ``numel`` elements of a flat's resting shard, a piece of a chunk, take on NVMe."""
    return round_up_pages(numel * kind.dtype.itemsize) if kind.plan.parameters.memory is Memory.NVME else 0


class NvmeLayout:
    """Know what rests on NVMe of the parameters of units, each given by its runs.

    Args:
        chunk_bytes: of masters and moments in a chunk of what is far; 0: as many as is usual.

    Attributes:
        read: by unit and run, the bytes that its flats' shards take there; and are read to gather them.
        rings: the buffers of the host that they go through: to the update, and to the device.
    """

    def __init__(self, units: Sequence[Runs], chunk_bytes: int) -> None:
        self.read = [[0] * len(runs) for runs in units]
        self.rings: list[tuple[StepBuffer, int]] = []
        flats = [(kind, i, j) for i, runs in enumerate(units) for j, (kind, n) in enumerate(runs) for _ in range(n)]
        if not any(kind.plan.parameters.memory is Memory.NVME for kind, _, _ in flats):
            return
        chunks = [*self._chunks(flats, chunk_bytes, frozen=False), *self._chunks(flats, chunk_bytes, frozen=True)]
        largest = max(map(sum, self.read))
        for nbytes, slots in ((max(chunks), min(RING_SLOTS, len(chunks))), (largest, READ_SLOTS)):
            self.rings.append((StepBuffer(Memory.HOST, "buffers", nbytes, torch.uint8, pool=("ring", ())), slots))

    def _chunks(self, flats: Sequence[tuple[FlatKind, int, int]], chunk_bytes: int, frozen: bool) -> Iterator[int]:
        """Yield what chunks have on NVMe: those of the update, or of what never trains."""
        if frozen:
            mine = [flat for flat in flats if not flat[0].trainable and nvme_shard_bytes(flat[0], 1)]
            shards = [(0, k.shard(k.plan.parameters), MOMENT_BLOCK * k.dtype.itemsize) for k, _, _ in mine]
        else:
            mine = [flat for flat in flats if flat[0].trainable and flat[0].far]
            shards = [(k.near, k.near + k.far, offloaded_block_bytes(k.plan.precision, k.dtype)) for k, _, _ in mine]
        for parts in divide_shards(shards, chunk_bytes or FAR_CHUNK_BYTES):
            total = 0
            for part in parts:
                kind, i, j = mine[part.shard]
                nbytes = nvme_shard_bytes(kind, part.end - part.begin)
                self.read[i][j] += nbytes
                total += nbytes
            yield total
