"""Backend interface of :class:`~npuzero.optim.optimizer.ZeroOptimizer`: update parameters, and keep their states."""

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

    Methods take the optimizer, with its ``param_groups`` and ``state``, and the worker keeps no reference: a reference
    cycle would keep the states' memory alive.

    Attributes:
        alike: the equivalent class in plain torch, as errors name it.
        constants: the values that random bits depend on, in addition to the groups.
        numbers: names of states that are a single number for any parameter's shape.
    """

    alike: str
    constants: Words
    numbers: frozenset[str] = frozenset({"step"})

    @abstractmethod
    def kind(self, name: str) -> str:
        """Return the optimizer's name for errors and for all ranks; ``name`` is its class's."""

    @abstractmethod
    def defaults(self, options: Options) -> Options:
        """Complete the user's options; raises torch's errors for invalid ones."""

    @abstractmethod
    def check_group(self, name: str, group: Options) -> None:
        """Check a new group with complete options; ``name`` is the name of the optimizer's class.

        Raises:
            ConfigError, or torch's errors: an option or a parameter is invalid.
        """

    def promise(self, optimizer: torch.optim.Optimizer, engine: Engine) -> EarlyUpdateRequest | None:
        """Return the request to start updates of a model inside backward; None to update only in the step."""
        return None

    @abstractmethod
    def update(self, optimizer: torch.optim.Optimizer, ready: list[Engine]) -> None:
        """Update plain parameters, and the parameters of models whose gradients are ready."""

    def decides_on_device(self, groups: list[Options]) -> bool:
        """Return whether torch.amp.GradScaler may leave ``grad_scale`` and ``found_inf`` on the device."""
        return False

    # -- states: of sharded parameters by flat and slot, of plain ones by parameter ------------------------------------

    @abstractmethod
    def state_names(self, groups: list[Options]) -> tuple[str, ...]:
        """Return the names that a parameter's state must have; the optimizer may keep more."""

    @abstractmethod
    def kept_names(self, groups: list[Options], saved: Collection[str]) -> Collection[str]:
        """Return the names of a parameter's state after a step with these groups; ``saved`` if they are unknown.

        Raises:
            CheckpointError: no step is possible from a state with the names ``saved``.
        """

    @abstractmethod
    def slot_state(self, flat: FlatParameter, i: int) -> Options:
        """Return the state of slot ``i`` as stored: numbers, and tensors, used only for their names and dimensions."""

    @abstractmethod
    def later(self, flat: FlatParameter, name: str, own: slice, snapshot: StateSnapshot) -> Later | None:
        """Return a function that gives a range of this rank's shard of the tensors ``name`` of all slots, as float32.
        It may copy; None if there is no such tensor.
        """

    @abstractmethod
    def restore(
        self, optimizer: torch.optim.Optimizer, engine: Engine, flat: FlatParameter, i: int, state: Mapping[str, Any]
    ) -> None:
        """Replace the state of slot ``i`` by numbers and 1-D tensors of this rank's part; an empty state removes it."""

    @abstractmethod
    def restore_numbers(
        self,
        optimizer: torch.optim.Optimizer,
        engine: Engine,
        flat: FlatParameter,
        slots: Sequence[Mapping[str, float | None]],
    ) -> Collection[str]:
        """Replace the numbers of each slot; return the names of the tensors, which :meth:`write` must then replace
        fully.
        """

    @abstractmethod
    def write(self, flat: FlatParameter, name: str, own: slice, values: Tensor) -> None:
        """Write a range of this rank's shard of the tensors ``name`` of all slots: full moment blocks, except at its
        end.
        """

    @abstractmethod
    def plain_state(self, optimizer: torch.optim.Optimizer, parameter: nn.Parameter) -> Options:
        """Return the state of a plain parameter in torch's format."""

    @abstractmethod
    def restore_plain(
        self, optimizer: torch.optim.Optimizer, group: Options, parameter: nn.Parameter, state: Mapping[str, Any]
    ) -> None:
        """Replace the state of a plain parameter of ``group`` by one in torch's format."""


def refuse_differentiable(name: str, group: Options) -> None:
    """Raise ConfigError if autograd should differentiate the update."""
    if group.get("differentiable"):
        raise ConfigError(
            name,
            expected="differentiable=False",
            got="True",
            do="Use torch.optim for an update that autograd goes through.",
        )
