"""Snapshot the state for an asynchronous save: copy tensors in memory, and keep stored parts from being overwritten."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from npuzero.shard.state.snapshot import KeptPart, Later, StateSnapshot

#: Size of a block of copies, unless one copy needs more.
_BLOCK_BYTES = 64 << 20


class SnapshotMemory:
    """Lend host memory to one snapshot after another; it is kept between saves, since fresh pages are slow.

    Attributes:
        blocks: of bytes.
    """

    def __init__(self, device: torch.device) -> None:
        self._pinned = device.type != "cpu"
        self.blocks: list[Tensor] = []
        self._block = self._used = 0

    def rewind(self) -> None:
        """Start again at the first block; its copies are overwritten."""
        self._block = self._used = 0

    def copy(self, values: Tensor) -> Tensor:
        """Return a copy in a block."""
        while self._block < len(self.blocks) and self._used + values.nbytes > self.blocks[self._block].numel():
            self._block, self._used = self._block + 1, 0
        if self._block == len(self.blocks):
            nbytes = max(values.nbytes, _BLOCK_BYTES)
            self.blocks.append(torch.empty(nbytes, dtype=torch.uint8, pin_memory=self._pinned))
        memory = self.blocks[self._block][self._used : self._used + values.nbytes]
        self._used += -(-values.nbytes // 64) * 64  # aligned for a copy of any dtype
        return memory.view(values.dtype).copy_(values)


class BackgroundSnapshot(StateSnapshot):
    """Take a snapshot: copy tensors in memory, and keep stored parts in place until :meth:`release`."""

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
        """Release all stored parts. Idempotent."""
        while self._kept:
            self._kept.pop().release()
