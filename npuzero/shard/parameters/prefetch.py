"""The forecast of which unit to gather next, from the last pass. A hint, never a condition for correctness."""

from __future__ import annotations


class ExecutionTrace:
    """Record the orders in which units began and ended to compute in the last pass; backward reverses the second."""

    def __init__(self) -> None:
        self._last: list[int] = []
        self._now: list[int] = []
        self._ended_last: list[int] = []
        self._ended: list[int] = []

    def begin(self) -> None:
        """Start a pass: what was recorded becomes the forecast."""
        self._last, self._now = self._now or self._last, []
        self._ended_last, self._ended = self._ended or self._ended_last, []

    def record(self, unit: int) -> None:
        self._now.append(unit)

    def record_end(self, unit: int) -> None:
        """Note that ``unit``, and all inside of it, has computed: backward reaches it before those."""
        self._ended.append(unit)

    def after(self, unit: int, depth: int) -> list[int]:
        """Return up to ``depth`` distinct units that followed ``unit`` in the last pass."""
        return _next_units(self._last, unit, depth, len(self._now) - 1)

    def before(self, unit: int, depth: int) -> list[int]:
        """Return up to ``depth`` distinct units that ended before ``unit`` in the present pass (else the last one)."""
        return _next_units((self._ended or self._ended_last)[::-1], unit, depth, 0)


def _next_units(trace: list[int], unit: int, depth: int, at: int) -> list[int]:
    """Return distinct units behind ``unit`` in ``trace``: its occurrence at position ``at``, else the first one."""
    # The position tells which use it is of a unit that computes several times in a pass.
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
