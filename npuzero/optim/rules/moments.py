"""Moments of a fused rule, stored in the number of bits that the precision sets."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from npuzero.plan import MOMENT_BLOCK
from npuzero.shard.state.snapshot import Later, StateSnapshot
from npuzero.shard.state.tiered_tensor import TieredTensor

#: The dtype of a moment by its name in a precision.
MOMENT_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "int8": torch.uint8}


class ShardMoments:
    """Store the moments of a flat parameter's shard.

    Args:
        signs: by name, whether a moment can be negative.
        near: by name, the part on the device, as stored.
        spreads: by name, the full shard across memories.
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
        """Return a function that gives a range at its present value, as float32. It may copy."""
        first = own.start // MOMENT_BLOCK * MOMENT_BLOCK
        blocks = self._spreads[name].later(slice(first, own.stop), snapshot, signed=self._signs[name])
        return lambda: blocks()[own.start - first :]

    def write(self, name: str, own: slice, values: Tensor) -> None:
        """Write ``values`` into a range of full blocks (except at its end), the inverse of :meth:`later`."""
        self._spreads[name].write(own, values.to(torch.float32).reshape(-1), signed=self._signs[name])
