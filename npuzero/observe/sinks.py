"""The sinks for events. A sink may be called from any thread. Each class documents its output."""

from __future__ import annotations

import dataclasses
import json
import os
import threading
from abc import ABC, abstractmethod
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from npuzero.errors import StorageError
from npuzero.observe.events import Count, Event, Instant, Span


class Sink(ABC):
    """Take events. Subclasses must implement :meth:`write`."""

    @abstractmethod
    def write(self, event: Event) -> None:
        """Take one finished event."""

    def begin(self, category: str, name: str) -> None:  # noqa: B027 - most sinks wait for the finished span
        """Open a span in this thread. Spans of a thread close in reverse order."""

    def end(self) -> None:  # noqa: B027
        """Close the span opened last in this thread; :meth:`write` follows."""

    def close(self) -> None:  # noqa: B027
        """Finish: no further event follows. Idempotent."""


class Events(Sink):
    """Keep every event in ``events``, in order of completion, for tests and later reading."""

    def __init__(self) -> None:
        self.events: list[Event] = []

    def write(self, event: Event) -> None:
        self.events.append(event)  # appending to a list is atomic


@dataclass
class EventTotal:
    """Hold the totals in :class:`Counters` of one (category, name): count, seconds of spans, and last value."""

    times: int = 0
    seconds: float = 0.0
    value: float = 0.0


class Counters(Sink):
    """Keep sums instead of events: ``counters.totals["gather", "blocks.3"].seconds``; ``value`` is the last Count's."""

    def __init__(self) -> None:
        self.totals: dict[tuple[str, str], EventTotal] = defaultdict(EventTotal)
        self._lock = threading.Lock()

    def write(self, event: Event) -> None:
        with self._lock:
            total = self.totals[event.category, event.name]
            total.times += 1
            if isinstance(event, Span):
                total.seconds += event.end_s - event.begin_s
            elif isinstance(event, Count):
                total.value = event.value


class JsonLines(Sink):
    """Write one JSON object per line and event: the event's fields and its ``kind``. Flushed by :meth:`close`.

    Raises:
        StorageError: the file cannot be opened or written.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._path = Path(path)
        self._lock = threading.Lock()
        try:
            self._file = self._path.open("w", encoding="utf-8")
        except OSError as error:
            raise _trace_write_error(self._path, error) from error

    def write(self, event: Event) -> None:
        line = json.dumps({"kind": type(event).__name__.lower(), **dataclasses.asdict(event)}, default=str)
        try:
            with self._lock:
                self._file.write(line + "\n")
        except OSError as error:
            raise _trace_write_error(self._path, error) from error

    def close(self) -> None:
        self._file.close()


class ChromeTrace(Sink):
    """Write a file for Perfetto or chrome://tracing on :meth:`close`: a process per rank, a thread per category.

    Format: the Trace Event Format document (phases X, i, C, M; times in microseconds).

    Raises:
        StorageError: the file cannot be written.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._path = Path(path)
        self._events: list[Event] = []
        self._closed = False

    def write(self, event: Event) -> None:
        self._events.append(event)

    def close(self) -> None:
        if self._closed:
            return
        try:
            self._path.write_text(
                json.dumps({"traceEvents": build_trace_events(self._events)}, default=str), encoding="utf-8"
            )
        except OSError as error:
            raise _trace_write_error(self._path, error) from error
        self._closed = True


def build_trace_events(events: list[Event]) -> list[dict[str, Any]]:
    """Return the events as objects of the Trace Event Format, with names for processes (ranks) and threads."""
    lanes: dict[tuple[int, str], int] = {}
    rows = [_build_trace_event(event, lanes.setdefault((event.rank, event.category), len(lanes))) for event in events]
    for rank in sorted({rank for rank, _ in lanes}):
        rows.append({"ph": "M", "name": "process_name", "pid": rank, "args": {"name": f"rank {rank}"}})
    for (rank, category), lane in lanes.items():
        rows.append({"ph": "M", "name": "thread_name", "pid": rank, "tid": lane, "args": {"name": category}})
    return rows


def _build_trace_event(event: Event, lane: int) -> dict[str, Any]:
    row: dict[str, Any] = {"name": event.name, "cat": event.category, "pid": event.rank, "tid": lane}
    if isinstance(event, Span):
        times = {"ts": event.begin_s * 1e6, "dur": (event.end_s - event.begin_s) * 1e6}
        return row | {"ph": "X", "args": dict(event.facts)} | times
    row["ts"] = event.at_s * 1e6
    if isinstance(event, Instant):
        return row | {"ph": "i", "s": "t", "args": dict(event.facts)}
    return row | {"ph": "C", "args": {event.name: event.value}}


class ProfilerRanges(Sink):
    """Open a ``torch.profiler.record_function`` range for each span, so that torch's profiler shows them."""

    def __init__(self) -> None:
        self._open = threading.local()

    def begin(self, category: str, name: str) -> None:
        from torch.profiler import record_function

        opened = record_function(f"npuzero.{category} {name}")
        opened.__enter__()
        self._stack().append(opened)

    def end(self) -> None:
        self._stack().pop().__exit__(None, None, None)

    def write(self, event: Event) -> None:
        """Do nothing: torch already has the range."""

    def _stack(self) -> list[Any]:
        if not hasattr(self._open, "ranges"):
            self._open.ranges = []
        ranges: list[Any] = self._open.ranges
        return ranges


def _trace_write_error(path: Path, error: OSError) -> StorageError:
    return StorageError(
        f"trace {path}",
        expected="a file that can be written",
        got=error.strerror or type(error).__name__,
        do="Check that the folder exists, is writable, and has space.",
    )
