"""What a save beside training needs of the state at its call: copies of what lies in memory, and the rest kept."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from npuzero.shard.state.snapshot import KeptPart, Later, StateSnapshot

#: Copies lie in blocks of so many bytes, or of as many as one of them has.
_BLOCK_BYTES = 64 << 20


class SnapshotMemory:
    """Lend host memory for one snapshot after the other: kept in between, since fresh pages take long.

    Attributes:
        blocks: of bytes.
    """

    def __init__(self, device: torch.device) -> None:
        self._pinned = device.type != "cpu"
        self.blocks: list[Tensor] = []
        self._block = self._used = 0

    def rewind(self) -> None:
        """Begin anew: nobody needs what was copied."""
        self._block = self._used = 0

    def copy(self, values: Tensor) -> Tensor:
        """Return a copy."""
        while self._block < len(self.blocks) and self._used + values.nbytes > self.blocks[self._block].numel():
            self._block, self._used = self._block + 1, 0
        if self._block == len(self.blocks):
            nbytes = max(values.nbytes, _BLOCK_BYTES)
            self.blocks.append(torch.empty(nbytes, dtype=torch.uint8, pin_memory=self._pinned))
        memory = self.blocks[self._block][self._used : self._used + values.nbytes]
        self._used += -(-values.nbytes // 64) * 64  # so that what follows may be of any dtype
        return memory.view(values.dtype).copy_(values)


class BackgroundSnapshot(StateSnapshot):
    """Take a snapshot: copy what lies in memory, keep where it is what lies on a disk, until all is released."""

    def __init__(self, copies: SnapshotMemory) -> None:
        copies.rewind()
        self._copies = copies
        self._kept: list[KeptPart] = []

    def copied(self, values: Tensor) -> Later:
        copy = self._copies.copy(values)
        return lambda: copy

    def kept(self, keep: Callable[[], KeptPart | None]) -> KeptPart | None:
        kept = keep()
        if kept is not None:
            self._kept.append(kept)
        return kept

    def release(self) -> None:
        """Keep nothing any more; may be called again."""
        while self._kept:
            self._kept.pop().release()
