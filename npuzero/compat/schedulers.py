"""Schedules of torch's whose optimizer has been replaced."""

from __future__ import annotations

import functools
from typing import Any

import torch

from npuzero.config import describe
from npuzero.errors import ConfigError


def repoint(schedule: Any, old: torch.optim.Optimizer | None, new: torch.optim.Optimizer) -> None:
    """Have a schedule change the learning rates of ``new``, which stands for ``old`` and has its groups in their order.

    Raises:
        ConfigError: it belongs to a third optimizer, whose learning rates nobody would follow.
    """
    parts = [*getattr(schedule, "_schedulers", ()), schedule]
    for part in parts:
        its = getattr(part, "optimizer", new)
        if its is not new and its is not old:
            raise ConfigError(
                "lr_scheduler",
                expected="a schedule over the optimizer that is passed beside it, or a function of an optimizer",
                got=f"{type(part).__name__} over {describe(its)}",
                do="Pass lr_scheduler=lambda optimizer: Schedule(optimizer, ...).",
            )
    for part in parts:
        if hasattr(part, "optimizer"):
            part.optimizer = new
    if old is not None:
        _count_steps(new)


def _count_steps(optimizer: Any) -> None:
    """Tell schedules of torch's that steps are taken, as they have an optimizer tell that they are made over."""
    step = optimizer.step
    if hasattr(step, "_wrapped_by_lr_sched"):
        return

    @functools.wraps(step)
    def counted(*args: Any, **options: Any) -> Any:
        optimizer._opt_called = True
        return step(*args, **options)

    counted._wrapped_by_lr_sched = True  # type: ignore[attr-defined]
    optimizer.step = counted
