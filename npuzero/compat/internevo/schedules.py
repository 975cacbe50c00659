"""InternEvo's schedules: of the learning rate, and of Adam's second beta."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch.optim.lr_scheduler import LRScheduler

from npuzero.errors import ConfigError


class FineTuneCosineAnnealingWarmupLR(LRScheduler):
    """Hold the learning rate at 0, raise it linearly to the optimizer's, and lower it along a cosine.

    The rates are those of InternEvo's class of this name, each from the number of steps alone: at step ``t``, with
    ``w = int(total_steps * warmup_ratio)``, ``0`` below ``init_steps``; then ``lr (t + 1 - init_steps) / w`` for ``w``
    steps; then ``eta_min + (lr - eta_min) (1 + cos(pi part)) / 2``, where ``part`` goes from 0 to 1 at ``total_steps``.

    Args:
        optimizer: whose groups' rates it sets; step it after each step of the optimizer that was taken.
        total_steps, init_steps: numbers of steps, the second among the first.
        warmup_ratio: part of ``total_steps``.
        eta_min: the rate at the end.
        last_epoch: steps taken; -1: none.

    Raises:
        ConfigError: no step is left for the cosine.

    Example::

        from npuzero.compat.internevo import FineTuneCosineAnnealingWarmupLR

        schedule = FineTuneCosineAnnealingWarmupLR(optimizer, total_steps=100, warmup_ratio=0.1, eta_min=1e-5)
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        total_steps: int,
        init_steps: int = 0,
        warmup_ratio: float = 0.0,
        eta_min: float = 0.0,
        last_epoch: int = -1,
    ) -> None:
        self.init_steps = init_steps
        self.warmup_steps = int(total_steps * warmup_ratio)
        self.cosine_steps = total_steps - self.warmup_steps - init_steps
        self.eta_min = eta_min
        if self.cosine_steps < 1:
            raise ConfigError(
                "lr_scheduler.total_steps",
                expected=f"more than the {init_steps} init_steps and {self.warmup_steps} of the warmup",
                got=str(total_steps),
                do="Raise total_steps, or lower warmup_ratio.",
            )
        super().__init__(optimizer, last_epoch)

    def get_lr(self) -> list[float | torch.Tensor]:
        """Return the rate of each group for the step that comes."""
        steps = self.last_epoch - self.init_steps
        if steps < 0:
            return [0.0 for _ in self.base_lrs]
        if steps < self.warmup_steps:
            return [rate * ((steps + 1) / self.warmup_steps) for rate in self.base_lrs]
        height = (1 + math.cos(math.pi * (steps - self.warmup_steps) / self.cosine_steps)) / 2
        return [self.eta_min + (rate - self.eta_min) * height for rate in self.base_lrs]


class Beta2Scheduler:
    """Raise Adam's second beta: after step ``t`` it is the larger of ``init_beta2`` and ``1 - t ** -c``.

    Args:
        optimizer: whose groups' ``betas`` it sets, from its first step on; until then they are as they are.
        init_beta2: the least.
        c: 0 or less: it stays at ``init_beta2``.
        cur_iter: steps taken; -1: none.

    Example::

        from npuzero.compat.internevo import Beta2Scheduler

        schedule = Beta2Scheduler(optimizer, init_beta2=0.95, c=0.8)
    """

    def __init__(self, optimizer: torch.optim.Optimizer, init_beta2: float, c: float = 0.8, cur_iter: int = -1) -> None:
        self.optimizer = optimizer
        self.init_beta2 = init_beta2
        self.c = c
        self.cur_iter = max(cur_iter, 0)

    def step(self, cur_iter: int | None = None) -> None:
        """Count a step, or go to one, and set the betas."""
        self.cur_iter = self.cur_iter + 1 if cur_iter is None else cur_iter
        for group in self.optimizer.param_groups:
            group["betas"] = (group["betas"][0], self.get_beta2())

    def get_beta2(self) -> float:
        """Return what the steps so far make of it."""
        if self.c <= 0 or self.cur_iter < 1:
            return self.init_beta2
        return float(max(self.init_beta2, 1 - self.cur_iter**-self.c))

    def state_dict(self) -> dict[str, Any]:
        return {"cur_iter": self.cur_iter}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Go on from where :meth:`state_dict` was taken; the betas are in the optimizer's state."""
        self.cur_iter = state_dict["cur_iter"]
