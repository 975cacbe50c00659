"""Parameters stored on NVMe: bytes per flat parameter and per chunk, and the host rings that they are read through."""

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

#: Runs of equal flat parameters, in order: the kind and the count.
Runs = Sequence[tuple[FlatKind, int]]


def nvme_shard_bytes(kind: FlatKind, numel: int) -> int:
    """Return the bytes on NVMe of ``numel`` elements of a parameter shard, a piece of a chunk."""
    return round_up_pages(numel * kind.dtype.itemsize) if kind.plan.parameters.memory is Memory.NVME else 0


class NvmeLayout:
    """Compute the storage on NVMe of the parameters of units, each given by its runs.

    Args:
        chunk_bytes: bytes of masters and moments per chunk of an offloaded update; 0: the default.

    Attributes:
        read: by unit and run, bytes of its shards on NVMe, which are read to gather them.
        rings: buffers on the host, and their count: the ring of the update, and the ring of gathers.
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
        """Yield the bytes on NVMe of each chunk of the update, or of the frozen parameters."""
        # Chunks follow the bytes of states, as in the update, so that one extent serves both; frozen parameters have no
        # states and are divided by their own bytes.
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
