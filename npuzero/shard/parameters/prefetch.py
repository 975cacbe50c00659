"""Predict the unit to prefetch next from the last pass. A hint; correctness never depends on it."""

from __future__ import annotations


class ExecutionTrace:
    """Record the order of unit starts and the order of unit ends in a pass; backward reverses the order of ends."""

    def __init__(self) -> None:
        self._last: list[int] = []
        self._now: list[int] = []
        self._ended_last: list[int] = []
        self._ended: list[int] = []

    def begin(self) -> None:
        """Start a pass; the recorded one becomes the prediction."""
        self._last, self._now = self._now or self._last, []
        self._ended_last, self._ended = self._ended or self._ended_last, []

    def record(self, unit: int) -> None:
        self._now.append(unit)

    def record_end(self, unit: int) -> None:
        """Record that ``unit`` finished forward. Backward visits an outer unit before the units nested in it."""
        self._ended.append(unit)

    def after(self, unit: int, depth: int) -> list[int]:
        """Return up to ``depth`` distinct units that followed ``unit`` in the last pass."""
        return _next_units(self._last, unit, depth, len(self._now) - 1)

    def before(self, unit: int, depth: int) -> list[int]:
        """Return up to ``depth`` distinct units that ended before ``unit`` in this pass, else in the last one."""
        return _next_units((self._ended or self._ended_last)[::-1], unit, depth, 0)


def _next_units(trace: list[int], unit: int, depth: int, at: int) -> list[int]:
    """Return distinct units after ``unit`` in ``trace``: after position ``at`` if it is there, else its first use."""
    # The position distinguishes the uses of a unit that computes several times in a pass.
    if at >= len(trace) or trace[at] != unit:
        if unit not in trace:
            return []
        at = trace.index(unit)
    found: list[int] = []
    for other in trace[at + 1 :]:
        if len(found) == depth:
            break
        if other != unit and other not in found:
            found.append(other)
    return found
