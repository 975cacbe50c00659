"""Gradients that one backward pass brings to one flat parameter, and their route."""

from __future__ import annotations

import enum
from collections.abc import Mapping

import torch
from torch import Tensor

from npuzero.errors import ConfigError
from npuzero.ops.pack import pack_unchecked
from npuzero.ops.storage.lazy import materialize_lazy
from npuzero.shard.layout.flat_layout import FlatLayout


class BackwardRole(enum.Enum):
    """Name the role of a backward pass in its step."""

    ALONE = "alone"  # under no_sync: accumulate on this rank; a later pass sends the sum
    SUMMED = "summed"  # R2; more passes may follow before the step
    LAST = "last"  # expected to be the step's last: R3 overlaps it as well


class GradientRoute(enum.Enum):
    """Name the route of a flat parameter's gradients, once all slots of the pass have arrived."""

    KEEP = "keep"  # accumulate into this rank's unsharded, unreduced gradients
    SEND = "send"  # pack into a communication buffer, for R2 or, if that is the identity, for R3
    BOTH = "both"  # accumulate into the gradients kept so far, and send the sum


class MicroBatchGradient:
    """Collect the gradients of the present backward pass.

    Attributes:
        arrived: by slot number what autograd made.
    """

    def __init__(self, layout: FlatLayout) -> None:
        self._layout = layout
        self._count = len(layout.slots)
        self.arrived: dict[int, Tensor] = {}

    @property
    def complete(self) -> bool:
        """Return whether every slot has received its gradient."""
        return len(self.arrived) >= self._count

    def add(self, i: int, gradient: Tensor) -> None:
        """Add the gradient of slot ``i``; reentrant checkpointing brings one per use in a pass."""
        earlier = self.arrived.get(i)
        self.arrived[i] = gradient if earlier is None else earlier + gradient

    def check(self) -> None:
        """Raise a ConfigError for gradients that cannot be packed; autograd ensures shape and dtype."""
        for i, gradient in self.arrived.items():
            if gradient.layout is not torch.strided:
                raise ConfigError(
                    f"gradient of {self._layout.slots[i].name}",
                    expected="a dense tensor",
                    got=str(gradient.layout),
                    do="Use sparse=False: a sharded state is kept and updated densely.",
                )

    def pack(self, arrived: Mapping[int, Tensor], into: Tensor, scale: float, accumulate: bool) -> None:
        """Scale some gradients and write them to their slots in ``into`` ([n], any float), or accumulate them."""
        if arrived:
            tensors = [materialize_lazy(gradient) for gradient in arrived.values()]
            offsets = [self._layout.slots[i].begin for i in arrived]
            pack_unchecked(tensors, offsets, into, scale=scale, accumulate=accumulate)
