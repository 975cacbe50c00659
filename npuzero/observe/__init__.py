"""Observation: typed events go to sinks; without a sink each call costs one ``if``, and nothing is ever printed.

A program records::

    with observe.recording(observe.ChromeTrace("trace.json")):
        train()

and the engine observes::

    with observe.span("gather", unit.name, nbytes=n): ...
    observe.instant("prefetch", unit.name)
"""

from npuzero.observe.bus import (
    add_sink,
    count,
    current_rank,
    emit,
    enabled,
    instant,
    recording,
    remove_sink,
    set_rank,
    span,
)
from npuzero.observe.events import Count, Event, Instant, Span
from npuzero.observe.sinks import ChromeTrace, Counters, Events, JsonLines, ProfilerRanges, Sink

__all__ = [
    "ChromeTrace",
    "Count",
    "Counters",
    "Event",
    "Events",
    "Instant",
    "JsonLines",
    "ProfilerRanges",
    "Sink",
    "Span",
    "add_sink",
    "count",
    "current_rank",
    "emit",
    "enabled",
    "instant",
    "recording",
    "remove_sink",
    "set_rank",
    "span",
]
