"""InternEvo's schedules: warm-up and cosine of the rate, and a second beta that grows with the number of steps.

The formulas are from InternEvo (``internlm/solver/schedulers``). It computes each rate of the cosine from the
previous rate; here each rate is computed directly, and differs only by rounding.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from npuzero.config import describe_value
from npuzero.errors import CheckpointError, ConfigError, config_error_as, refuse_unknown_keywords
from npuzero.schedules.checks import check_numbers, check_optimizer, check_steps


class _WarmupCosineScheduler(LRScheduler):
    """Keep the rate at 0, raise it linearly to the optimizer's own, and lower it along half a cosine."""

    def __init__(
        self,
        optimizer: Optimizer,
        total_steps: int,
        init_steps: int,
        warmup_steps: int,
        eta_min: float,
        last_epoch: int,
    ) -> None:
        name = type(self).__name__
        check_optimizer(name, optimizer)
        check_steps(name, total_steps=total_steps)
        check_steps(name, -1, last_epoch=last_epoch)
        check_numbers(name, 0, eta_min=eta_min)
        if total_steps <= init_steps + warmup_steps:
            raise ConfigError(
                f"{name}: total_steps",
                expected=f"more than the {init_steps + warmup_steps} steps before the cosine begins",
                got=str(total_steps),
                do="Train longer, or warm up in fewer steps.",
                key="total_steps",
            )
        self.total_steps, self.init_steps, self.warmup_steps = total_steps, init_steps, warmup_steps
        self.eta_min = eta_min
        super().__init__(optimizer, last_epoch)

    def get_lr(self) -> list[float | Tensor]:
        """Return the rate of each group after ``last_epoch`` steps."""
        warmed = self.last_epoch + 1 - self.init_steps
        begun = self.last_epoch - self.init_steps - self.warmup_steps
        if warmed <= 0:
            return [0.0 for _ in self.base_lrs]
        if begun < 0:
            return [warmed / self.warmup_steps * own for own in self.base_lrs]
        steps = self.total_steps - self.init_steps - self.warmup_steps
        height = (1 + math.cos(math.pi * begun / steps)) / 2
        return [self.eta_min + (own - self.eta_min) * height for own in self.base_lrs]


@refuse_unknown_keywords()
class CosineAnnealingWarmupLR(_WarmupCosineScheduler):
    """Raise the rate linearly to the optimizer's own, then lower it along half a cosine to ``eta_min``.

    After e steps it is (e + 1) / warmup_steps of the optimizer's; from warmup_steps on eta_min + (own - eta_min) * (1 +
    cos(pi * (e - warmup_steps) / (total_steps - warmup_steps))) / 2 (InternEvo's class of this name).

    Args:
        optimizer: a torch optimizer.
        total_steps: optimizer steps in total.
        warmup_steps: steps of the warm-up, included in the total.
        eta_min: the final rate.
        last_epoch: step to resume from; -1: start.

    Raises:
        ConfigError: arguments out of range, or no steps left for the cosine.

    Example::

        schedule = npuzero.schedules.CosineAnnealingWarmupLR(optimizer, total_steps=1000, warmup_steps=100)
        optimizer.step()
        schedule.step()
    """

    def __init__(
        self,
        optimizer: Optimizer,
        total_steps: int,
        warmup_steps: int = 0,
        eta_min: float = 0.0,
        last_epoch: int = -1,
    ) -> None:
        check_steps(type(self).__name__, 0, warmup_steps=warmup_steps)
        super().__init__(optimizer, total_steps, 0, warmup_steps, eta_min, last_epoch)


@refuse_unknown_keywords()
class FineTuneCosineAnnealingWarmupLR(_WarmupCosineScheduler):
    """Keep the rate at 0 for ``init_steps``, then continue as :class:`CosineAnnealingWarmupLR`.

    The ``lr_scheduler`` of an InternEvo configuration means this schedule.

    Args:
        optimizer: a torch optimizer.
        total_steps: optimizer steps in total.
        init_steps: steps with rate 0, included in the total.
        warmup_ratio: fraction of the total for the warm-up after these, rounded down to an integer number of steps.
        eta_min: the final rate.
        last_epoch: step to resume from; -1: start.

    Raises:
        ConfigError: arguments out of range, or no steps left for the cosine.

    Example::

        lr_scheduler = {"total_steps": 1000, "init_steps": 0, "warmup_ratio": 0.01, "eta_min": 1e-5, "last_epoch": -1}
        schedule = npuzero.schedules.FineTuneCosineAnnealingWarmupLR(optimizer, **lr_scheduler)
    """

    def __init__(
        self,
        optimizer: Optimizer,
        total_steps: int,
        init_steps: int = 0,
        warmup_ratio: float = 0.0,
        eta_min: float = 0.0,
        last_epoch: int = -1,
    ) -> None:
        name = type(self).__name__
        check_steps(name, 0, total_steps=total_steps, init_steps=init_steps)
        check_numbers(name, 0, warmup_ratio=warmup_ratio)
        super().__init__(optimizer, total_steps, init_steps, int(total_steps * warmup_ratio), eta_min, last_epoch)


@refuse_unknown_keywords()
class Beta2Scheduler:
    """Raise the second beta of every group with the number of steps: max(init_beta2, 1 - 1 / steps^c).

    After Zhai et al. 2022 (arXiv 2106.04560) and Shazeer & Stern 2018 (arXiv 1804.04235), as in InternEvo's class of
    this name: it changes nothing before its first step, and only sets ``init_beta2`` if ``c`` is not positive.

    Args:
        optimizer: an optimizer with ``betas``.
        init_beta2: the minimum, in [0, 1).
        c: the exponent; 0 or 0.8 in InternEvo's configurations.
        cur_iter: steps already taken; -1: none.

    Raises:
        ConfigError: arguments out of range, or an optimizer without betas.

    Example::

        betas = npuzero.schedules.Beta2Scheduler(optimizer, init_beta2=0.95, c=0.8)
        optimizer.step()
        betas.step()
    """

    def __init__(self, optimizer: Optimizer, init_beta2: float, c: float = 0.8, cur_iter: int = -1) -> None:
        name = type(self).__name__
        check_optimizer(name, optimizer)
        check_numbers(name, 0, init_beta2=init_beta2)
        check_numbers(name, -math.inf, c=c)
        check_steps(name, -1, cur_iter=cur_iter)
        if "betas" not in optimizer.defaults or init_beta2 >= 1:
            raise config_error_as(TypeError)(
                f"{name}: {'init_beta2' if init_beta2 >= 1 else 'optimizer'}",
                expected="a number below 1" if init_beta2 >= 1 else "one with betas, such as npuzero.AdamW",
                got=describe_value(init_beta2) if init_beta2 >= 1 else type(optimizer).__name__,
                do="Correct it.",
            )
        self.optimizer = optimizer
        self.init_beta2, self.c, self.cur_iter = init_beta2, c, max(cur_iter, 0)

    def get_beta2(self) -> float:
        """Return the second beta after ``cur_iter`` steps."""
        grown = 1 - 1 / self.cur_iter**self.c if self.c > 0 and self.cur_iter > 0 else 0.0
        return max(self.init_beta2, grown)

    def step(self) -> None:
        """Count one more optimizer step, and set the second beta of every group."""
        self.cur_iter += 1
        for group in self.optimizer.param_groups:
            group["betas"] = (group["betas"][0], self.get_beta2())

    def state_dict(self) -> dict[str, Any]:
        """Return the state for :meth:`load_state_dict`. The betas are in the optimizer's state."""
        return {"init_beta2": self.init_beta2, "c": self.c, "cur_iter": self.cur_iter}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Restore the state returned by :meth:`state_dict`.

        Raises:
            CheckpointError: the state has different keys.
        """
        if not isinstance(state_dict, Mapping) or state_dict.keys() != self.state_dict().keys():
            raise CheckpointError(
                "state of a Beta2Scheduler",
                expected=f"a mapping with {', '.join(self.state_dict())}",
                got=str(sorted(state_dict)) if isinstance(state_dict, Mapping) else type(state_dict).__name__,
                do="Load what its state_dict() gave.",
            )
        self.init_beta2, self.c, self.cur_iter = (state_dict[name] for name in self.state_dict())
