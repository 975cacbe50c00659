"""Delayed updates by hand: in plain torch, and by an engine with everything on the device.

Each ``step()`` applies the gradients of the step before, with the learning rate, scale and skip of that step. So the
model computes with parameters that are one update older than its masters.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

import npuzero

from .toy import toy_loss, toy_tokens
from .train import CutSession, PlainSession, State


class DelayedOptimizer:
    """Run a torch optimizer one step late: the oracle of a plan with ``lag=1``."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer
        self._pending: tuple[list[Tensor | None], list[dict[str, Any]]] | None = None

    def step(self) -> None:
        gradients = [None if p.grad is None else p.grad.clone() for p in self._parameters()]
        options = [{key: value for key, value in g.items() if key != "params"} for g in self.param_groups]
        self.apply_pending()
        self._pending = gradients, options

    def apply_pending(self) -> None:
        if self._pending is None:
            return
        late, self._pending = self._pending, None
        now = [p.grad for p in self._parameters()], [dict(group) for group in self.param_groups]
        self._set(*late)
        self._optimizer.step()
        self._set(*now)

    def zero_grad(self) -> None:
        self._optimizer.zero_grad()

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        return self._optimizer.param_groups

    def _parameters(self) -> list[nn.Parameter]:
        return [p for group in self.param_groups for p in group["params"]]

    def _set(self, gradients: list[Tensor | None], options: list[dict[str, Any]]) -> None:
        for parameter, gradient in zip(self._parameters(), gradients, strict=True):
            parameter.grad = gradient
        for group, values in zip(self.param_groups, options, strict=True):
            group.update(values)


class LateSession(CutSession):
    """Run the engine's own delayed updates."""

    def stepped(self) -> None:
        """Record that a step has been taken."""

    def seen(self) -> State:
        """Return the parameters that the model computes with."""
        return self.state()

    def ends(self) -> None:
        """Flush the pending update."""
        npuzero.apply_pending(self.model)


class HandSession(LateSession):
    """Run an engine that updates at once, with a model that computes with the parameters of one update ago."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._seen = self._now = self.state()

    def loss(self, step: int = 0, micro_batch: int = 0, **options: Any) -> Tensor:
        trains = [(name, p) for name, p in self.model.named_parameters() if p.requires_grad]

        def late(tokens: Tensor) -> Tensor:
            return functional_call(
                self.model, {name: _SeenValue.apply(p, self._seen[name]) for name, p in trains}, (tokens,)
            )

        return toy_loss(late, toy_tokens(step, micro_batch, self.ranks[0]))

    def stepped(self) -> None:
        self._seen, self._now = self._now, self.state()

    def seen(self) -> State:
        return self._seen

    def ends(self) -> None:
        self._seen = self._now


class PlainLateSession(PlainSession):
    """Run plain torch."""

    def optimizer(self, *arguments: Any, **options: Any) -> Any:
        self._delayed = DelayedOptimizer(super().optimizer(*arguments, **options))
        return self._delayed

    def stepped(self) -> None:
        pass

    def seen(self) -> State:
        return self.state()

    def ends(self) -> None:
        self._delayed.apply_pending()


class _SeenValue(torch.autograd.Function):
    """Take the value of one tensor, and the gradient of another."""

    @staticmethod
    def forward(_: Any, parameter: Tensor, value: Tensor) -> Tensor:
        return value.clone()

    @staticmethod
    def backward(_: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None
