"""The observable events. Times are seconds of `time.perf_counter`, one clock for all ranks of a host."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Span:
    """Record an activity with a duration: ``Span("gather", "blocks.3", ...)``.

    Attributes:
        category: the kind of work (``compute``, ``gather``, ``reduce``, ``update`` ...); a lane of the trace.
        name: the object of the work, usually a unit.
        begin_s, end_s: its begin and end in seconds.
        rank: global rank that did it.
        facts: further values, such as ``nbytes``; ``error`` is the type of the exception that ended it, if any.
    """

    category: str
    name: str
    begin_s: float
    end_s: float
    rank: int
    facts: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Instant:
    """Record a momentary event."""

    category: str
    name: str
    at_s: float
    rank: int
    facts: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Count:
    """Record the value of a quantity from now on, such as bytes held."""

    category: str
    name: str
    at_s: float
    rank: int
    value: float


Event = Span | Instant | Count
