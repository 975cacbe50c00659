"""Transient buffers that are used again instead of allocated again."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable

import torch
from torch import Tensor

from npuzero.memory.space import Source, Space


class Pool:
    """Lends buffers by length and dtype; what is returned goes to the next asker, contents and all.

    A kind is what a user says of the contents it leaves behind (where a wire is zero, for one). A buffer of the kind
    asked for is preferred, so that a steady step finds its buffers as it left them.
    """

    def __init__(self, space: Space, source: Source | None = None, label: str = "buffers") -> None:
        self._space = space
        self._source = source
        self._label = label
        self._idle: dict[tuple[int, torch.dtype], list[tuple[Hashable, Tensor]]] = defaultdict(list)

    def acquire(self, numel: int, dtype: torch.dtype, kind: Hashable = None) -> tuple[Tensor, bool]:
        """A 1-D buffer of ``numel`` elements, and whether it is as a user of this kind left it (or new, all zero)."""
        idle = self._idle[numel, dtype]
        if not idle:
            return self._space.allocate(numel, dtype, self._label, self._source), True
        at = next((i for i, (left, _) in enumerate(idle) if left == kind), len(idle) - 1)
        left, buffer = idle.pop(at)
        return buffer, left == kind

    def release(self, buffer: Tensor, kind: Hashable = None) -> None:
        """Take ``buffer`` back; the caller holds no view of it any more."""
        self._idle[buffer.numel(), buffer.dtype].append((kind, buffer))
