"""Run a fused rule over the shards of sharded models, and over plain parameters."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from npuzero.errors import ConfigError, did_you_mean
from npuzero.optim.rules.moments import MOMENT_DTYPES
from npuzero.optim.rules.rule import Options, UpdateRule
from npuzero.optim.workers import torch_states as states
from npuzero.optim.workers.base import OptimizerWorker, refuse_differentiable
from npuzero.optim.workers.early_update import Begun, EarlyUpdateStarter, check_early
from npuzero.optim.workers.plain_parameters import NumberedParameter, PlainParameterWorker
from npuzero.optim.workers.sharded_parameters import Members, ShardedParameterWorker
from npuzero.plan import DTYPES, MASTERS
from npuzero.shard.engine import Engine
from npuzero.shard.find_engine import split_by_engine
from npuzero.shard.gradients.vote_rules import Words
from npuzero.shard.state.flat_parameter import FlatParameter
from npuzero.shard.state.snapshot import Later, StateSnapshot


class FusedWorker(OptimizerWorker):
    """Update parameters by a fused rule.

    Args:
        masters, moments, seed, early: as for :class:`npuzero.AdamW`.

    Raises:
        ConfigError: an argument has an unknown value.
    """

    def __init__(
        self, rule: UpdateRule, masters: str | None, moments: str | None, seed: int, early: bool | int = False
    ) -> None:
        _check_choice("masters", masters, MASTERS)
        _check_choice("moments", moments, MOMENT_DTYPES)
        if type(seed) is not int or not 0 <= seed < 2**64:
            raise ConfigError(
                "seed", expected="an int from 0 to 2^64 - 1", got=repr(seed), do="Give one in that range."
            )
        self.alike = rule.alike
        self.constants: Words = {"seed": seed}
        self._rule = rule
        self._chosen = {"masters": masters, "moments": moments}
        self._early = check_early(early)
        self._begin()

    def _begin(self) -> None:
        """Drop step counts, states and everything cached between steps."""
        self._shards = ShardedParameterWorker(self._rule, self._chosen, self.constants["seed"])
        self._plain = PlainParameterWorker(self._rule, **self._chosen, seed=self.constants["seed"])

    def __getstate__(self) -> Options:
        """Leave states out: the optimizer has the plain parameters' states, and sharded ones cannot be copied."""
        return {k: v for k, v in self.__dict__.items() if k not in ("_shards", "_plain")}

    def __setstate__(self, state: Options) -> None:
        self.__dict__.update(state)
        self._begin()

    def kind(self, name: str) -> str:
        return name

    def defaults(self, options: Options) -> Options:
        return self._rule.defaults(options)

    def check_group(self, name: str, group: Options) -> None:
        self._rule.defaults(group)
        refuse_differentiable(name, group)
        for parameter in group["params"]:
            if parameter.dtype not in DTYPES.values():
                raise ConfigError(
                    f"{name}: a parameter of shape {tuple(parameter.shape)}",
                    expected="float32, bfloat16 or float16, as for torch's fused optimizers on most devices",
                    got=str(parameter.dtype),
                    do=f"Give it to {self.alike}, or as real and imaginary parts.",
                )
        if any(isinstance(beta, Tensor) and beta.device.type != "cpu" for beta in group.get("betas", ())):
            raise ConfigError(
                f"{name}: betas",
                expected="numbers, or tensors in the host's memory",
                got="tensors on a device, for which each step would wait",
                do="Give numbers; lr may be a tensor on the device.",
            )

    def promise(self, optimizer: torch.optim.Optimizer, engine: Engine) -> EarlyUpdateStarter | None:
        if not self._early:
            return None
        return EarlyUpdateStarter(self, optimizer, engine, None if self._early is True else self._early)

    def begin(self, optimizer: torch.optim.Optimizer, engine: Engine) -> Begun | None:
        """Begin an update of a model inside backward; None if it has to wait for its step."""
        return self._shards.begin(optimizer, engine, _number_members(optimizer))

    def update(self, optimizer: torch.optim.Optimizer, ready: list[Engine]) -> None:
        groups = optimizer.param_groups
        for group in groups:
            group.update(self._rule.always)
        members = _number_members(optimizer)
        plain = split_by_engine(itertools.chain.from_iterable(group["params"] for group in groups))[1]
        self._plain.update(
            optimizer.state,
            [NumberedParameter(*members[id(parameter)], parameter) for parameter in plain],
            # A torch GradScaler stores these two on the optimizer.
            getattr(optimizer, "grad_scale", None),
            getattr(optimizer, "found_inf", None),
        )
        for engine in ready:
            self._shards.update(optimizer, engine, members)

    def decides_on_device(self, groups: list[Options]) -> bool:
        return all(group["fused"] or group["capturable"] for group in groups)

    # -- states ----------------------------------------------------------------------------------------------------

    def state_names(self, groups: list[Options]) -> tuple[str, ...]:
        return ("step", *self._shards.kept(groups))

    def kept_names(self, groups: list[Options], saved: Collection[str]) -> Collection[str]:
        states.check_state_names("optimizer state", dict.fromkeys(saved), needs := self.state_names(groups))
        return needs

    def slot_state(self, flat: FlatParameter, i: int) -> Options:
        return self._shards.slot_state(flat, i)

    def later(self, flat: FlatParameter, name: str, own: slice, snapshot: StateSnapshot) -> Later | None:
        return self._shards.later(flat, name, own, snapshot)

    def restore(
        self, optimizer: torch.optim.Optimizer, engine: Engine, flat: FlatParameter, i: int, state: Mapping[str, Any]
    ) -> None:
        own = flat.own_slots[i]
        for name in self._shards.restore_steps(optimizer, engine, flat, {i: state}):
            self._shards.write(flat, name, own, state[name] if state else torch.zeros(own.stop - own.start))

    def restore_numbers(
        self,
        optimizer: torch.optim.Optimizer,
        engine: Engine,
        flat: FlatParameter,
        slots: Sequence[Mapping[str, float | None]],
    ) -> Collection[str]:
        return self._shards.restore_steps(optimizer, engine, flat, dict(enumerate(slots)))

    def write(self, flat: FlatParameter, name: str, own: slice, values: Tensor) -> None:
        self._shards.write(flat, name, own, values)

    def plain_state(self, optimizer: torch.optim.Optimizer, parameter: nn.Parameter) -> Options:
        return self._plain.read(parameter, optimizer.state.get(parameter, {}))

    def restore_plain(
        self, optimizer: torch.optim.Optimizer, group: Options, parameter: nn.Parameter, state: Mapping[str, Any]
    ) -> None:
        mine = self._plain.write(parameter, state)
        optimizer.state.pop(parameter, None)
        if mine:
            optimizer.state[parameter] = mine
            if group["capturable"]:
                self._plain.count_on_device(parameter, mine)


def _number_members(optimizer: torch.optim.Optimizer) -> Members:
    return {
        id(p): (number, group) for number, (group, p) in enumerate(states.numbered_parameters(optimizer.param_groups))
    }


def _check_choice(name: str, value: str | None, allowed: Iterable[str]) -> None:
    if value is not None and (not isinstance(value, str) or value not in allowed):
        do = did_you_mean(value, tuple(allowed), "Choose among these.")
        raise ConfigError(name, expected=f"None or one of {', '.join(allowed)}", got=repr(value), do=do)
