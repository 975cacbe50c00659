"""Moments: what a fused rule keeps of each element beside its master, in as many bits as the precision says."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from npuzero.plan import MOMENT_BLOCK
from npuzero.shard.state.snapshot import Later, StateSnapshot
from npuzero.shard.state.tiered_tensor import TieredTensor

#: In which dtype a moment is stored, by the name that a precision gives it.
MOMENT_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "int8": torch.uint8}


class ShardMoments:
    """Hold the moments of one flat's shard.

    Args:
        signs: by name of a moment, whether it can be negative.
        near: by name, what lies on the device, as it is stored.
        spreads: by name, all of it, wherever it lies.
    """

    def __init__(
        self, signs: Mapping[str, bool], near: Mapping[str, Tensor], spreads: Mapping[str, TieredTensor]
    ) -> None:
        self._signs = signs
        self._spreads = spreads
        self.near = near

    def __contains__(self, name: str) -> bool:
        return name in self._signs

    def __iter__(self) -> Iterator[str]:
        return iter(self._signs)

    def later(self, name: str, own: slice, snapshot: StateSnapshot) -> Later:
        """Return a range as it is now, for later: as float32, maybe a copy."""
        first = own.start // MOMENT_BLOCK * MOMENT_BLOCK
        blocks = self._spreads[name].later(slice(first, own.stop), snapshot, signed=self._signs[name])
        return lambda: blocks()[own.start - first :]

    def write(self, name: str, own: slice, values: Tensor) -> None:
        """Replace a range, whole blocks but for its end, by ``values``: what :meth:`later` gave comes back."""
        self._spreads[name].write(own, values.to(torch.float32).reshape(-1), signed=self._signs[name])
