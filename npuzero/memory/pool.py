"""Transient buffers that are used again instead of allocated again."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable

import torch
from torch import Tensor

from npuzero.memory.space import Space


class Pool:
    """Lends buffers by kind: a returned buffer goes to the next asker of the same kind, contents and all.

    The kind is the caller's promise about what it leaves in the buffer (a wire's gaps stay zero, for one), beside
    length and dtype. A steady step lends only what an earlier step allocated.
    """

    def __init__(self, space: Space, label: str = "buffers") -> None:
        self._space = space
        self._label = label
        self._idle: dict[Hashable, list[Tensor]] = defaultdict(list)

    def acquire(self, numel: int, dtype: torch.dtype, kind: Hashable = None) -> Tensor:
        """A 1-D buffer of ``numel`` elements; zeroed when new, else as its last user left it."""
        idle = self._idle[numel, dtype, kind]
        return idle.pop() if idle else self._space.allocate(numel, dtype, self._label)

    def release(self, buffer: Tensor, kind: Hashable = None) -> None:
        """Take ``buffer`` back; the caller holds no view of it any more."""
        self._idle[buffer.numel(), buffer.dtype, kind].append(buffer)
