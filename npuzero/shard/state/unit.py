"""A unit: parameters that are all-gathered and reduced together, in flat parameters, with their state."""

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
    """Hold a module, the flat parameters it owns, and their state (FSDP: a parameter group).

    Attributes:
        plan: the plan that its flat parameters follow.
        tile: whether it is a tile of a layer that is never unsharded entirely.
        guarded: whether its parameters may be read only while it computes. Each flat's ``apart`` tells whether memory
            is allocated and released then: not where strict mode guards the parameters of a single rank.
        ranks: number of ranks that train it.
        thin: whether the all-gather before compute sends quantized parameters.
        rounded: whether the present unsharded values come from such an all-gather.
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
        # Whether strict mode is the only reason for guarding.
        self.strict = self.guarded and not any(flat.apart for flat in flats)
        self.ranks = max((flat.rests.averaged.size for flat in flats), default=1)
        self.parameter_state = ParameterState.SHARDED if self.guarded else ParameterState.WHOLE
        # Forward passes with a backward pending or running (see AutogradHooks).
        self.backward_expected = False
        self.computing = 0
        # Backward may need it at any time, for example if a forward's outputs hide tensors: it then stays unsharded
        # until backward ends.
        self.opaque = False
        # Flat parameters with gradients still to arrive in the present backward pass.
        self.missing = set(self.trainable)

    def parameters(self) -> Iterator[nn.Parameter]:
        for flat in self.flats:
            yield from flat.parameters

    def move(self, to: ParameterState) -> None:
        """Change the parameters' state, as the life cycle allows."""
        self.parameter_state = check_transition(f"parameters of unit {self.name!r}", self.parameter_state, to)

    def close(self) -> None:
        """Guard the parameters against reads."""
        for parameter in self.parameters():
            guard.guard_parameter(parameter)

    def reopen(self) -> None:
        """Enable reads of the parameters, and watch writes to them."""
        for parameter in self.parameters():
            guard.watch_parameter(parameter)

    def check_views(self, thoroughly: bool = False) -> None:
        """Check that every parameter is still a view of its flat buffer: another engine would replace the data.

        It would replace all of them, so before a forward the first parameter of each flat is enough.

        Raises:
            StateError: a parameter's data is elsewhere.
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
