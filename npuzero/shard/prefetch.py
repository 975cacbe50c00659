"""The forecast of which unit to gather next, from the last pass. A hint, never a condition for correctness."""

from __future__ import annotations


class Trace:
    """Record the order in which units computed in the last pass; forecast backward as its reverse."""

    def __init__(self) -> None:
        self._last: list[int] = []
        self._now: list[int] = []

    def begin(self) -> None:
        """Start a pass: what was recorded becomes the forecast."""
        if self._now:
            self._last = self._now
        self._now = []

    def record(self, unit: int) -> None:
        self._now.append(unit)

    def after(self, unit: int, depth: int) -> list[int]:
        """Return up to ``depth`` distinct units that followed ``unit`` in the last pass."""
        return _following(self._last, unit, depth, len(self._now) - 1)

    def before(self, unit: int, depth: int) -> list[int]:
        """Return up to ``depth`` distinct units that came before ``unit`` in the present pass (else the last one).

        Nothing came before the first, whose output is the loss's: backward begins with it and goes on with the last.
        """
        trace = self._now or self._last
        if trace[:1] == [unit]:
            trace = [*trace, unit]
        return _following(trace[::-1], unit, depth, 0)


def _following(trace: list[int], unit: int, depth: int, at: int) -> list[int]:
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
