"""Observation: typed events go to sinks. Without a sink each call costs one ``if``; nothing is ever printed.

Spans, instants and counts flow in from the engine (``bus.py``), and to every sink that a program has added: a Chrome
trace, JSON lines, counters, or torch's profiler (``sinks.py``). ``events.py`` defines their fields.

A program records::

    with observe.recording(observe.ChromeTrace("trace.json")):
        train()

and the engine observes::

    with observe.span("gather", unit.name, nbytes=n): ...
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
