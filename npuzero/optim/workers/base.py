"""Who works behind the API that :class:`~npuzero.optim.optimizer.ZeroOptimizer` is: it updates, and keeps states."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from npuzero.errors import ConfigError
from npuzero.optim.rules.rule import Options
from npuzero.shard.engine import Engine
from npuzero.shard.gradients.vote_rules import Words
from npuzero.shard.state.flat_parameter import FlatParameter
from npuzero.shard.state.snapshot import Later, StateSnapshot
from npuzero.shard.step.early_update import EarlyUpdateRequest


class OptimizerWorker(ABC):
    """Update the parameters of one optimizer and keep their states.

    It is handed the optimizer, whose ``param_groups`` and ``state`` it works by, and does not keep it: a cycle would
    keep the states' memory.

    Attributes:
        alike: who does the same in plain torch, as errors name it.
        constants: what random bits depend on, beside the groups.
        numbers: names of states that are one number, whatever the parameter's shape.
    """

    alike: str
    constants: Words
    numbers: frozenset[str] = frozenset({"step"})

    @abstractmethod
    def kind(self, name: str) -> str:
        """Name the optimizer in errors, and to the other ranks; ``name`` is its class's."""

    @abstractmethod
    def defaults(self, options: Options) -> Options:
        """Complete the options that the user gave; raises what torch raises for some that cannot be."""

    @abstractmethod
    def check_group(self, name: str, group: Options) -> None:
        """Look at a new group, its options complete; ``name`` is the optimizer's class's.

        Raises:
            ConfigError, or what torch raises: options or parameters that no update can take.
        """

    def promise(self, optimizer: torch.optim.Optimizer, engine: Engine) -> EarlyUpdateRequest | None:
        """Return what the optimizer promises to a model that it has, so that updates can begin inside backward."""
        return None

    @abstractmethod
    def update(self, optimizer: torch.optim.Optimizer, ready: list[Engine]) -> None:
        """Update plain parameters, and those of models whose gradients are ready."""

    def decides_on_device(self, groups: list[Options]) -> bool:
        """Tell whether torch.amp.GradScaler may leave ``grad_scale`` and ``found_inf`` on the device,
        for the update.
        """
        return False

    # -- states: of sharded parameters by flat and slot, of plain ones by themselves ----------------------------------

    @abstractmethod
    def state_names(self, groups: list[Options]) -> tuple[str, ...]:
        """Return the names that a parameter's state must have; others are the optimizer's own business."""

    @abstractmethod
    def kept_names(self, groups: list[Options], saved: Collection[str]) -> Collection[str]:
        """Return the names that a parameter's state has after a step with these groups; ``saved`` if nobody can say.

        Raises:
            CheckpointError: no step can be taken from a state of the names ``saved``.
        """

    @abstractmethod
    def slot_state(self, flat: FlatParameter, i: int) -> Options:
        """Return the state of slot ``i``, as it lies here: numbers, and tensors, of which names and dimensions are
        told.
        """

    @abstractmethod
    def later(self, flat: FlatParameter, name: str, own: slice, snapshot: StateSnapshot) -> Later | None:
        """Return, for later, as float32 a range of this rank's part of the tensors ``name`` of all slots, maybe a
        copy; None if there is none.
        """

    @abstractmethod
    def restore(
        self, optimizer: torch.optim.Optimizer, engine: Engine, flat: FlatParameter, i: int, state: Mapping[str, Any]
    ) -> None:
        """Replace the state of slot ``i`` by 1-D tensors of this rank's part of it, and numbers; or by nothing."""

    @abstractmethod
    def restore_numbers(
        self,
        optimizer: torch.optim.Optimizer,
        engine: Engine,
        flat: FlatParameter,
        slots: Sequence[Mapping[str, float | None]],
    ) -> Collection[str]:
        """Replace the numbers of each slot; return the names of the tensors, all of which :meth:`write` replaces."""

    @abstractmethod
    def write(self, flat: FlatParameter, name: str, own: slice, values: Tensor) -> None:
        """Replace a range of this rank's part of the tensors ``name`` of all slots, whole blocks of moments but for
        its end.
        """

    @abstractmethod
    def plain_state(self, optimizer: torch.optim.Optimizer, parameter: nn.Parameter) -> Options:
        """Return the state of a plain parameter, in torch's shape."""

    @abstractmethod
    def restore_plain(
        self, optimizer: torch.optim.Optimizer, group: Options, parameter: nn.Parameter, state: Mapping[str, Any]
    ) -> None:
        """Replace the state of a plain parameter of ``group`` by one in torch's shape."""


def refuse_differentiable(name: str, group: Options) -> None:
    """Raise ConfigError where autograd is to go through the update."""
    if group.get("differentiable"):
        raise ConfigError(
            name,
            expected="differentiable=False",
            got="True",
            do="Use torch.optim for an update that autograd goes through.",
        )
