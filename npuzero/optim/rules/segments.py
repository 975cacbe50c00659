"""Build the arguments of a launch over parameters laid end to end: segments, and rows of coefficients."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from operator import attrgetter
from typing import Any, cast

import torch
from torch import Tensor

from npuzero.optim.rules.rule import ParameterRange, UpdateRule
from npuzero.plan import START_ELEMENTS

_BEGIN, _END = attrgetter("begin"), attrgetter("end")


class CoefficientRows:
    """Collect rows of coefficients for launches with an lr or a step count that only the device knows.

    Args:
        device: of the table.
    """

    def __init__(self, rule: UpdateRule, device: torch.device) -> None:
        self._rule = rule
        self._device = device
        self._of: dict[tuple[int, int], int] = {}
        self._options: list[Mapping[str, Any]] = []
        self._steps: list[float | Tensor] = []

    def row(self, options: Mapping[str, Any], step: int | Tensor) -> tuple[int, int | None]:
        """Return (step number, None) if the host knows both step and lr, else (0, row number).

        Args:
            options: of the parameter's group.
            step: the number of earlier updates, a () tensor on the device; or the number of this update, an int.
        """
        counted = isinstance(step, Tensor)
        if not counted and not is_on_device(options["lr"], self._device):
            return cast(int, step), None
        row = self._of.setdefault((id(options), id(step) if counted else -cast(int, step)), len(self._of))
        if row == len(self._options):
            self._options.append(options)
            self._steps.append(step + 1 if counted else step)
        return 0, row

    def table(self) -> Tensor | None:
        """Return [rows, columns] float32; None without rows."""
        return self._rule.rows(self._options, self._steps, self._device) if self._options else None


def is_on_device(value: float | Tensor, device: torch.device) -> bool:
    """Return whether a number must be read on ``device``. The host reads tensors in its own memory, without a sync."""
    return isinstance(value, Tensor) and (value.device.type != "cpu" or device.type == "cpu")


def stack_float64(values: Sequence[float | Tensor], device: torch.device) -> Tensor:
    """Return [n] float64 on ``device``, one number per row."""
    wide: dict[str, Any] = {"dtype": torch.float64, "device": device}
    return torch.stack(
        [
            value.to(**wide).view(())
            if isinstance(value, Tensor) and is_on_device(value, device)
            # A fill kernel, since a copy from the host would wait and cannot be captured.
            else torch.full((), float(value), **wide)
            for value in values
        ]
    )


def ranges_within(ranges: list[ParameterRange], begin: int, end: int) -> list[ParameterRange]:
    """Return the parts of ascending ranges inside ``[begin, end)``."""
    chosen = ranges[bisect_right(ranges, begin, key=_END) : bisect_left(ranges, end, key=_BEGIN)]
    if chosen and chosen[0].begin < begin:
        first = chosen[0]
        place = None if first.place is None else first.place + begin - first.begin
        chosen[0] = first._replace(begin=begin, place=place)
    if chosen and chosen[-1].end > end:
        chosen[-1] = chosen[-1]._replace(end=end)
    return chosen


def shift_ranges(ranges: Iterable[ParameterRange], by: int) -> Iterator[ParameterRange]:
    """Yield the ranges moved by ``by`` elements, for another line."""
    return (part._replace(begin=part.begin + by, end=part.end + by) for part in ranges)


def build_segments(rule: UpdateRule, ranges: Iterable[ParameterRange]) -> list[Any]:
    """Return the segments for the line of ``rule`` from ascending ranges.

    Neighbours with the same options and step count become one segment across the padding between them, which is zero in
    every buffer. They stay separate if the rule would not keep zeros, or if they have random bits of their own.
    """
    runs: list[list[ParameterRange]] = []  # first and last range of each run
    for part in ranges:
        if runs and _can_merge(rule, runs[-1][1], part):
            runs[-1][1] = part
        else:
            runs.append([part, part])
    return [rule.segment(first, last) for first, last in runs]


def _can_merge(rule: UpdateRule, last: ParameterRange, part: ParameterRange) -> bool:
    """Return whether only padding is between two ranges: a parameter in between takes START_ELEMENTS or more."""
    if last.options is not part.options or (last.step, last.row) != (part.step, part.row) or part.place is not None:
        return False
    gap = part.begin - last.end
    return gap == 0 or (gap < START_ELEMENTS and rule.keeps_zeros(part.options))
