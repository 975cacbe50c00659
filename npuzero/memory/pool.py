"""Pool buffers for reuse."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable

import torch
from torch import Tensor

from npuzero.memory.space import MemorySpace, Source


class BufferPool:
    """Lend buffers by length and dtype. A returned buffer is lent again with its contents.

    A kind identifies the contents that a user leaves in a buffer, for example the elements of a communication buffer
    that are zero. A buffer of the requested kind is preferred, so a steady step finds its buffers as it left them.
    """

    def __init__(self, space: MemorySpace, source: Source | None = None, label: str = "buffers") -> None:
        self._space = space
        self._source = source
        self._label = label
        self._idle: dict[tuple[int, torch.dtype], list[tuple[Hashable, Tensor]]] = defaultdict(list)
        self._lent: dict[int, Tensor] = {}  # by address

    def acquire(self, numel: int, dtype: torch.dtype, kind: Hashable = None) -> tuple[Tensor, bool]:
        """Return a 1-D buffer of ``numel`` elements, and whether it is new or was released with this kind."""
        idle = self._idle[numel, dtype]
        if not idle:
            left, buffer = kind, self._space.allocate(numel, dtype, self._label, self._source)
        else:
            at = next((i for i, (left, _) in enumerate(idle) if left == kind), len(idle) - 1)
            left, buffer = idle.pop(at)
        self._lent[buffer.data_ptr()] = buffer
        return buffer, left == kind

    def release(self, buffer: Tensor, kind: Hashable = None) -> None:
        """Return ``buffer`` to the pool; the caller must hold no view of it."""
        self._lent.pop(buffer.data_ptr(), None)
        self._idle[buffer.numel(), buffer.dtype].append((kind, buffer))

    def reclaim(self) -> None:
        """Return all lent buffers to the pool after an error: their users will not, and no code uses them."""
        for buffer in list(self._lent.values()):
            self.release(buffer)
