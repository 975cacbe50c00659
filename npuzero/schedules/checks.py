"""Checks of the schedules' arguments."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

from torch.optim import Optimizer

from npuzero.config import describe_value
from npuzero.errors import ConfigError, config_error_as, did_you_mean


def check_optimizer(schedule: str, optimizer: Any) -> None:
    """Raise a ConfigError that is also a TypeError if ``optimizer`` is not an optimizer."""
    if not isinstance(optimizer, Optimizer):
        raise config_error_as(TypeError)(
            schedule,
            expected="an optimizer, torch's or npuzero's",
            got=describe_value(optimizer),
            do="Make the optimizer first; of a wrapper pass what it wraps.",
        )


def check_numbers(schedule: str, least: float, **numbers: Any) -> None:
    """Raise a ConfigError for the first value that is not a finite number of at least ``least``."""
    for name, value in numbers.items():
        if not _is_number(value) or value < least:
            raise ConfigError(
                f"{schedule}: {name}",
                expected=f"a number not below {least:g}",
                got=describe_value(value),
                do="Correct it.",
                key=name,
            )


def check_steps(schedule: str, least: int = 1, **numbers: Any) -> None:
    """Raise a ConfigError for the first value that is not an integer of at least ``least``."""
    for name, value in numbers.items():
        if type(value) is not int or value < least:
            raise ConfigError(
                f"{schedule}: {name}",
                expected=f"an integer not below {least}",
                got=describe_value(value),
                do="Count in optimizer steps.",
                key=name,
            )


def check_choice(schedule: str, name: str, value: Any, known: Iterable[str]) -> None:
    """Raise a ConfigError if ``value`` is not in ``known``."""
    known = tuple(known)
    if value not in known:
        raise ConfigError(
            f"{schedule}: {name}",
            expected=f"one of {', '.join(known)}",
            got=describe_value(value),
            do=did_you_mean(value, known, "Choose among these."),
            key=name,
        )


def values_per_group(schedule: str, optimizer: Optimizer, name: str, value: Any) -> list[float]:
    """Return one number per parameter group, from a number or a sequence.

    Raises:
        ConfigError: the values are not numbers, or not as many as groups.
    """
    groups = len(optimizer.param_groups)
    values = list(value) if isinstance(value, Sequence) and not isinstance(value, str) else [value] * groups
    if len(values) != groups or not all(map(_is_number, values)):
        raise ConfigError(
            f"{schedule}: {name}",
            expected=f"a number, or {groups} of them, one of each parameter group",
            got=describe_value(value),
            do="Correct it.",
            key=name,
        )
    return values


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
