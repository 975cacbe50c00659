"""The contribution of one backward pass to one flat: gradients as they leave autograd, and their route from there."""

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

    ALONE = "alone"  # under no_sync: it adds up on this rank, and a later one takes it along
    SUMMED = "summed"  # R2, and maybe more passes before the step
    LAST = "last"  # foreseen to be the step's last: R3 runs beside it, too


class GradientRoute(enum.Enum):
    """Name the way of a flat's contribution, once it is complete."""

    KEEP = "keep"  # into the unsharded gradients that this rank adds up alone
    SEND = "send"  # packed into a communication buffer, for R2 or, where that is the identity, for R3
    BOTH = "both"  # what was kept so far goes along: added to it, and sent


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
        """Return whether every slot has its gradient."""
        return len(self.arrived) >= self._count

    def add(self, i: int, gradient: Tensor) -> None:
        """Add the gradient of slot ``i``; a second one of a pass is from reentrant checkpointing, once per use."""
        earlier = self.arrived.get(i)
        self.arrived[i] = gradient if earlier is None else earlier + gradient

    def check(self) -> None:
        """Raise a ConfigError for what cannot be packed; autograd sees to shape and dtype."""
        for i, gradient in self.arrived.items():
            if gradient.layout is not torch.strided:
                raise ConfigError(
                    f"gradient of {self._layout.slots[i].name}",
                    expected="a dense tensor",
                    got=str(gradient.layout),
                    do="Use sparse=False: a sharded state is kept and updated densely.",
                )

    def pack(self, arrived: Mapping[int, Tensor], into: Tensor, scale: float, accumulate: bool) -> None:
        """Write some gradients, scaled, to where their slots lie in ``into`` ([n], any float), or add them there."""
        if arrived:
            tensors = [materialize_lazy(gradient) for gradient in arrived.values()]
            offsets = [self._layout.slots[i].begin for i in arrived]
            pack_unchecked(tensors, offsets, into, scale=scale, accumulate=accumulate)
