"""A unit: parameters that are gathered and reduced together, the flats they lie in, and their state."""

from __future__ import annotations

import weakref
from collections.abc import Iterator

import torch
from torch import nn

from npuzero.errors import StateError
from npuzero.plan import Plan
from npuzero.shard.layout.find_units import UnitSpec
from npuzero.shard.layout.tiled_linear import LinearTile
from npuzero.shard.modules import sharded_tensor as guard
from npuzero.shard.state.flat_parameter import FlatParameter
from npuzero.shard.state.life_cycle import ParameterState, check_transition


class Unit:
    """Hold a module, the flats of the parameters it owns, and the states they are in (FSDP: a parameter group).

    Attributes:
        plan: the row that its flats follow.
        tile: whether it is a tile of a layer that is never unsharded as a whole.
        guarded: whether its parameters may be read only while it computes. Which bytes come and go then is said by each
            flat's ``apart``: none, where strict mode guards what the only rank has.
        ranks: how many train it.
        thin: whether its parameters travel rounded where they are gathered to compute.
        rounded: whether those that are here now have.
    """

    def __init__(self, spec: UnitSpec, index: int, flats: list[FlatParameter], plan: Plan) -> None:
        self.name = spec.name
        self.index = index
        self.module = weakref.ref(spec.module)
        self.flats = flats
        self.plan = plan
        self.tile = isinstance(spec.module, LinearTile)
        self.trainable = [flat for flat in flats if flat.trainable]
        bits = plan.precision.gather_bits
        self.thin = bits is not None and any(flat.rests.parameters.cut for flat in flats)
        self.rounded = False
        self.has_frozen = len(self.trainable) < len(flats)
        self.guarded = any(flat.rests.parameters.guarded for flat in flats)
        # Whether strict mode alone keeps programs from them.
        self.strict = self.guarded and not any(flat.apart for flat in flats)
        self.ranks = max((flat.rests.averaged.size for flat in flats), default=1)
        self.parameter_state = ParameterState.SHARDED if self.guarded else ParameterState.WHOLE
        # Forward passes whose backward is to come or under way (see Hooks).
        self.backward_expected = False
        self.computing = 0
        # May backward need it whenever it likes, as where a forward's outputs hide tensors? Then it stays whole until
        # backward ends.
        self.opaque = False
        # Flats whose gradients the present backward pass has still to bring.
        self.missing = set(self.trainable)

    def parameters(self) -> Iterator[nn.Parameter]:
        for flat in self.flats:
            yield from flat.parameters

    def move(self, to: ParameterState) -> None:
        """Change the parameters' state, as their life-cycle allows."""
        self.parameter_state = check_transition(f"parameters of unit {self.name!r}", self.parameter_state, to)

    def close(self) -> None:
        """Guard the parameters against reading."""
        for parameter in self.parameters():
            guard.guard_parameter(parameter)

    def reopen(self) -> None:
        """Let the parameters be read, and watch writes into them."""
        for parameter in self.parameters():
            guard.watch_parameter(parameter)

    def check_views(self, thoroughly: bool = False) -> None:
        """Check that every parameter is still a view of its flat: another engine around the model replaces the data.

        It replaces that of all, so before a forward a look at the first of each flat is enough.

        Raises:
            StateError: a parameter's data lies elsewhere.
        """
        with torch._C.DisableTorchFunctionSubclass():
            for flat in self.flats:
                base = flat.whole.data_ptr()
                for parameter, offset in zip(flat.parameters, flat.offsets, strict=True):
                    if parameter.data_ptr() != base + offset and parameter.numel():
                        self._complain(flat, parameter)
                    if not thoroughly:
                        break

    def _complain(self, flat: FlatParameter, parameter: nn.Parameter) -> None:
        slot = next(s for s, p in zip(flat.layout.slots, flat.parameters, strict=True) if p is parameter)
        raise StateError(
            f"parameter {slot.name}",
            expected=f"a view of the flat buffer of unit {self.name!r}",
            got="data elsewhere: replaced after npuzero.zero(), e.g. by FSDP around it or p.data = ...",
            do="Convert and move the model first, then call npuzero.zero(); "
            "load weights with npuzero.load_full_state_dict.",
        )
