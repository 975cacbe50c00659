"""DeepSpeed's five schedules as torch schedulers: the keywords of its JSON, and bit-identical values.

The formulas are from DeepSpeed 0.19.8 (``runtime/lr_schedules.py``). It counts optimizer steps from 0, and uses -1
before the schedule's first ``step()``, so that a rate belongs to the *previous* iteration: ``last_epoch`` here is one
larger. As with every torch schedule: create it after the optimizer, step it after each ``optimizer.step()``
(DeepSpeed's engine skips overflows), and save its ``state_dict()``.
"""

from __future__ import annotations

import math
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence

from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from npuzero.errors import refuse_unknown_keywords
from npuzero.schedules.checks import check_choice, check_numbers, check_optimizer, check_steps, values_per_group

Rates = list[float | Tensor]

#: By ``warmup_type``: the fraction of the warm-up after a number of its steps.
_WARMUPS: Mapping[str, Callable[[int, int], float]] = {
    "log": lambda done, steps: 1.0 / math.log(steps) * math.log(done + 1),
    "linear": lambda done, steps: done / steps,
}


class _IterationScheduler(LRScheduler, ABC):
    """Compute the rates of iteration ``last_batch_iteration``, which is -1 before the first.

    :meth:`state_dict` saves, with torch's, the attributes that a subclass sets before it calls this constructor.
    """

    def __init__(self, optimizer: Optimizer, last_batch_iteration: int) -> None:
        check_steps(type(self).__name__, -1, last_batch_iteration=last_batch_iteration)
        for group in optimizer.param_groups:
            group.setdefault("initial_lr", group["lr"].clone() if isinstance(group["lr"], Tensor) else group["lr"])
        super().__init__(optimizer, last_batch_iteration)

    @property
    def last_batch_iteration(self) -> int:
        """Return the last iteration in DeepSpeed's counting."""
        return self.last_epoch - 1

    def get_lr(self) -> Rates:
        """Return the rate of each group at ``last_batch_iteration``."""
        return self._rates(self.last_batch_iteration)

    @abstractmethod
    def _rates(self, iteration: int) -> Rates:
        """Return the rate of each group at ``iteration``, which is at least -1."""


@refuse_unknown_keywords()
class LRRangeTest(_IterationScheduler):
    """Raise the rate from ``lr_range_test_min_lr``, linearly or in stairs, to find the largest usable rate.

    The rate at iteration i is min_lr * (1 + step_rate * (i + 1) / step_size), with the quotient rounded down for a
    staircase (Smith 2018, arXiv 1803.09820; DeepSpeed's ``LRRangeTest``).

    Args:
        optimizer: a torch optimizer.
        lr_range_test_min_lr: a number, or one per parameter group.
        lr_range_test_step_size: optimizer steps per interval.
        lr_range_test_step_rate: increase of the rate per interval, as a fraction of min_lr.
        lr_range_test_staircase: raise the rate only at the end of an interval.
        last_batch_iteration: iteration to resume from; -1: start.

    Raises:
        ConfigError: arguments out of range.

    Example::

        schedule = npuzero.schedules.LRRangeTest(optimizer, lr_range_test_min_lr=1e-4, lr_range_test_step_size=200)
        optimizer.step()
        schedule.step()
    """

    def __init__(
        self,
        optimizer: Optimizer,
        lr_range_test_min_lr: float | Sequence[float] = 1e-3,
        lr_range_test_step_size: int = 2000,
        lr_range_test_step_rate: float = 1.0,
        lr_range_test_staircase: bool = False,
        last_batch_iteration: int = -1,
    ) -> None:
        name = type(self).__name__
        check_optimizer(name, optimizer)
        check_steps(name, lr_range_test_step_size=lr_range_test_step_size)
        check_numbers(name, -math.inf, lr_range_test_step_rate=lr_range_test_step_rate)
        self.min_lrs = values_per_group(name, optimizer, "lr_range_test_min_lr", lr_range_test_min_lr)
        self.step_size, self.step_rate = lr_range_test_step_size, lr_range_test_step_rate
        self.staircase = lr_range_test_staircase
        super().__init__(optimizer, last_batch_iteration)

    def _rates(self, iteration: int) -> Rates:
        intervals = float(iteration + 1) / self.step_size
        raised = 1 + self.step_rate * (math.floor(intervals) if self.staircase else intervals)
        return [least * raised for least in self.min_lrs]


@refuse_unknown_keywords()
class OneCycle(_IterationScheduler):
    """Move the rate up and down once, betas in the opposite direction, and decay both afterwards.

    After Smith 2018 (arXiv 1803.09820), as in DeepSpeed's ``OneCycle``: the height within the cycle moves linearly from
    0 to 1 and back, optionally in stairs. The rate is min + height * (max - min), and the first beta max - height *
    (max - min). After the cycle the rate is min / (1 + decay_lr_rate * n), and the beta max * (1 + decay_mom_rate * n),
    with n = iterations since / decay_step_size. In the optimizer's first step both the rate and the beta are min; the
    second beta is always 0.99, independent of the optimizer's.

    Args:
        optimizer: a torch optimizer; without ``betas`` its momentum is not changed, with a warning.
        cycle_min_lr, cycle_max_lr: a number, or one per parameter group.
        decay_lr_rate: 0: the rate stays at ``cycle_min_lr`` after the cycle.
        cycle_first_step_size, cycle_second_step_size: optimizer steps up, and down; None: as many as up.
        cycle_first_stair_count, cycle_second_stair_count: stairs up, and down; 0 or -1: none; None: as up.
        decay_step_size: 0: no decay.
        cycle_momentum: whether betas are cycled.
        cycle_min_mom, cycle_max_mom: of the first beta; a number, or one per parameter group.
        decay_mom_rate: 0: the first beta stays at ``cycle_max_mom``.
        last_batch_iteration: iteration to resume from; -1: start.

    Raises:
        ConfigError: arguments out of range.

    Example::

        schedule = npuzero.schedules.OneCycle(
            optimizer, cycle_min_lr=1e-4, cycle_max_lr=1e-3, cycle_first_step_size=100
        )
        optimizer.step()
        schedule.step()
    """

    def __init__(  # noqa: PLR0913, PLR0917 - DeepSpeed's signature
        self,
        optimizer: Optimizer,
        cycle_min_lr: float | Sequence[float],
        cycle_max_lr: float | Sequence[float],
        decay_lr_rate: float = 0.0,
        cycle_first_step_size: float = 2000,
        cycle_second_step_size: float | None = None,
        cycle_first_stair_count: int = 0,
        cycle_second_stair_count: int | None = None,
        decay_step_size: float = 0,
        cycle_momentum: bool = True,
        cycle_min_mom: float | Sequence[float] = 0.8,
        cycle_max_mom: float | Sequence[float] = 0.9,
        decay_mom_rate: float = 0.0,
        last_batch_iteration: int = -1,
    ) -> None:
        name = type(self).__name__
        check_optimizer(name, optimizer)
        down = cycle_first_step_size if cycle_second_step_size is None else cycle_second_step_size
        stairs_down = cycle_first_stair_count if cycle_second_stair_count is None else cycle_second_stair_count
        check_numbers(name, 1, cycle_first_step_size=cycle_first_step_size)
        check_numbers(
            name, 0, cycle_second_step_size=down, decay_step_size=decay_step_size, decay_lr_rate=decay_lr_rate
        )
        check_numbers(name, -math.inf, decay_mom_rate=decay_mom_rate)
        check_steps(name, -1, cycle_first_stair_count=cycle_first_stair_count, cycle_second_stair_count=stairs_down)
        self.up, self.down = float(cycle_first_step_size), float(down)
        self.stairs_up, self.stairs_down = cycle_first_stair_count, stairs_down
        self.decay_step_size, self.decay_lr_rate, self.decay_mom_rate = decay_step_size, decay_lr_rate, decay_mom_rate
        self.min_lrs = values_per_group(name, optimizer, "cycle_min_lr", cycle_min_lr)
        self.max_lrs = values_per_group(name, optimizer, "cycle_max_lr", cycle_max_lr)
        self.min_moms = values_per_group(name, optimizer, "cycle_min_mom", cycle_min_mom)
        self.max_moms = values_per_group(name, optimizer, "cycle_max_mom", cycle_max_mom)
        self.cycle_momentum = cycle_momentum and "betas" in optimizer.defaults
        if cycle_momentum and not self.cycle_momentum:
            text = f"OneCycle leaves the momentum of {type(optimizer).__name__} alone, which has no betas: say "
            warnings.warn(f"{text}cycle_momentum=False", UserWarning, stacklevel=2)
        super().__init__(optimizer, last_batch_iteration)

    def step(self, epoch: int | None = None) -> None:
        """Take one optimizer step: rates, and betas if they are cycled."""
        super().step(epoch)
        if self.cycle_momentum:
            for group, first in zip(self.optimizer.param_groups, self._momenta(self.last_batch_iteration), strict=True):
                group["betas"] = (first, 0.99)

    def _rates(self, iteration: int) -> Rates:
        if iteration < self.up + self.down:
            height = self._height(iteration)
            return [least + (most - least) * height for least, most in zip(self.min_lrs, self.max_lrs, strict=True)]
        decays = self._intervals(iteration) * self.decay_lr_rate
        return [least / (1 + decays) for least in self.min_lrs]

    def _momenta(self, iteration: int) -> list[float]:
        if iteration < 0:  # the optimizer's first step, in which the rate is also the minimum
            return self.min_moms
        if iteration < self.up + self.down:
            height = self._height(iteration)
            return [most - (most - least) * height for least, most in zip(self.min_moms, self.max_moms, strict=True)]
        decays = self._intervals(iteration) * self.decay_mom_rate
        return [most * (1 + decays) for most in self.max_moms]

    def _intervals(self, iteration: int) -> float:
        """Return the decay intervals since the cycle; 0 without decay."""
        since = iteration - (self.up + self.down) + 1
        return since / self.decay_step_size if self.decay_step_size else 0.0

    def _height(self, iteration: int) -> float:
        """Return the height between minimum and maximum: 0 to 1 and back within a cycle."""
        total, done = self.up + self.down, iteration + 1
        part = 1.0 + done / total - math.floor(1 + done / total)
        top = self.up / total
        rises = part <= top
        stairs = self.stairs_up if rises else self.stairs_down
        if stairs <= 0:
            return part / top if rises else (part - 1) / (top - 1)
        # Count stairs from full steps: a quotient could be just below an integer.
        within = done % total
        reached = within * stairs / self.up if within <= self.up else (total - within) * stairs / self.down
        return math.floor(reached) / stairs


@refuse_unknown_keywords()
class WarmupLR(_IterationScheduler):
    """Raise the rate from ``warmup_min_lr`` to ``warmup_max_lr``, and keep it there.

    The rate at iteration i of n is min + (max - min) * log(i + 1) / log(n), or * i / n for a linear warm-up
    (DeepSpeed's ``WarmupLR``); in the first step it is min.

    Args:
        optimizer: a torch optimizer.
        warmup_min_lr: a number, or one per parameter group.
        warmup_max_lr: a number, or one per parameter group; None: the optimizer's own.
        warmup_num_steps: n, in optimizer steps; 1 is treated as 2.
        warmup_type: ``"log"`` or ``"linear"``.
        last_batch_iteration: iteration to resume from; -1: start.

    Raises:
        ConfigError: arguments out of range.

    Example::

        schedule = npuzero.schedules.WarmupLR(optimizer, warmup_max_lr=1e-3, warmup_num_steps=100, warmup_type="linear")
        optimizer.step()
        schedule.step()
    """

    def __init__(
        self,
        optimizer: Optimizer,
        warmup_min_lr: float | Sequence[float] = 0.0,
        warmup_max_lr: float | Sequence[float] | None = None,
        warmup_num_steps: int = 1000,
        warmup_type: str = "log",
        last_batch_iteration: int = -1,
    ) -> None:
        name = type(self).__name__
        check_optimizer(name, optimizer)
        check_steps(name, warmup_num_steps=warmup_num_steps)
        check_choice(name, "warmup_type", warmup_type, _WARMUPS)
        self.warmup_num_steps, self.warmup_type = max(2, warmup_num_steps), warmup_type
        self.min_lrs = values_per_group(name, optimizer, "warmup_min_lr", warmup_min_lr)
        most = [float(group.get("initial_lr", group["lr"])) for group in optimizer.param_groups]
        self.max_lrs = (
            most if warmup_max_lr is None else values_per_group(name, optimizer, "warmup_max_lr", warmup_max_lr)
        )
        super().__init__(optimizer, last_batch_iteration)

    def _rates(self, iteration: int) -> Rates:
        if iteration < 0:
            return [*self.min_lrs]
        warms = iteration < self.warmup_num_steps
        part = _WARMUPS[self.warmup_type](iteration, self.warmup_num_steps) if warms else self._part_after(iteration)
        return [least + (most - least) * part for least, most in zip(self.min_lrs, self.max_lrs, strict=True)]

    def _part_after(self, iteration: int) -> float:
        """Return the position between minimum (0) and maximum (1) after the warm-up."""
        return 1.0


@refuse_unknown_keywords()
class WarmupDecayLR(WarmupLR):
    """Raise the rate as :class:`WarmupLR` does, then lower it linearly until ``total_num_steps``.

    After the warm-up it is min + (max - min) * (total - i) / (total - n), and min after the end (DeepSpeed's
    ``WarmupDecayLR``).

    Args:
        optimizer: a torch optimizer.
        total_num_steps: optimizer steps in total.
        warmup_min_lr, warmup_max_lr, warmup_num_steps, warmup_type, last_batch_iteration: as for :class:`WarmupLR`.

    Raises:
        ConfigError: arguments out of range.

    Example::

        params = {"total_num_steps": 1000, "warmup_min_lr": 0, "warmup_max_lr": 3e-4, "warmup_num_steps": 100}
        schedule = npuzero.schedules.WarmupDecayLR(optimizer, **params)
    """

    def __init__(
        self,
        optimizer: Optimizer,
        total_num_steps: int,
        warmup_min_lr: float | Sequence[float] = 0.0,
        warmup_max_lr: float | Sequence[float] | None = 0.001,
        warmup_num_steps: int = 1000,
        warmup_type: str = "log",
        last_batch_iteration: int = -1,
    ) -> None:
        check_steps(type(self).__name__, total_num_steps=total_num_steps)
        self.total_num_steps = total_num_steps
        super().__init__(optimizer, warmup_min_lr, warmup_max_lr, warmup_num_steps, warmup_type, last_batch_iteration)

    def _part_after(self, iteration: int) -> float:
        left = float(self.total_num_steps - iteration)
        return max(0.0, left / float(max(1.0, self.total_num_steps - self.warmup_num_steps)))


@refuse_unknown_keywords()
class WarmupCosineLR(_IterationScheduler):
    """Raise the rate to the optimizer's own, then lower it along half a cosine until ``total_num_steps``.

    A rate is the optimizer's times a ratio. Warm-up: warmup_min_ratio + (1 - warmup_min_ratio) * log(i + 1) / log(n),
    or i / n for a linear one; then cos_min_ratio + (1 - cos_min_ratio) * (1 + cos(pi * p)) / 2 with p = (i - n + 1) /
    (total - n), at most 1 (DeepSpeed's ``WarmupCosineLR``). The ratio of the first step is 0.

    Args:
        optimizer: a torch optimizer.
        total_num_steps: optimizer steps in total.
        warmup_min_ratio: at the start.
        warmup_num_steps: n, in optimizer steps; 1 is treated as 2.
        cos_min_ratio: at the end.
        warmup_type: ``"log"`` or ``"linear"``.
        last_batch_iteration: iteration to resume from; -1: start.

    Raises:
        ConfigError: arguments out of range.

    Example::

        schedule = npuzero.schedules.WarmupCosineLR(optimizer, total_num_steps=1000, warmup_num_steps=100)
        optimizer.step()
        schedule.step()
    """

    def __init__(
        self,
        optimizer: Optimizer,
        total_num_steps: int,
        warmup_min_ratio: float = 0.0,
        warmup_num_steps: int = 1000,
        cos_min_ratio: float = 0.0001,
        warmup_type: str = "log",
        last_batch_iteration: int = -1,
    ) -> None:
        name = type(self).__name__
        check_optimizer(name, optimizer)
        check_steps(name, total_num_steps=total_num_steps, warmup_num_steps=warmup_num_steps)
        check_numbers(name, 0, warmup_min_ratio=warmup_min_ratio, cos_min_ratio=cos_min_ratio)
        check_choice(name, "warmup_type", warmup_type, _WARMUPS)
        self.total_num_steps, self.warmup_num_steps = total_num_steps, max(2, warmup_num_steps)
        self.warmup_min_ratio, self.cos_min_ratio, self.warmup_type = warmup_min_ratio, cos_min_ratio, warmup_type
        super().__init__(optimizer, last_batch_iteration)

    def _rates(self, iteration: int) -> Rates:
        ratio = self._ratio(iteration)
        return [own * ratio for own in self.base_lrs]

    def _ratio(self, iteration: int) -> float:
        if iteration < 0:
            return 0.0
        if iteration < self.warmup_num_steps:
            part = _WARMUPS[self.warmup_type](iteration, self.warmup_num_steps)
            return self.warmup_min_ratio + part * (1.0 - self.warmup_min_ratio)
        steps = max(1, self.total_num_steps - self.warmup_num_steps)
        done = min(1.0, (iteration - self.warmup_num_steps + 1) / steps)
        part = (1 + math.cos(math.pi * done)) / 2
        return max(0.0, self.cos_min_ratio + (1.0 - self.cos_min_ratio) * part)
