"""Delivery of events to sinks. Without a sink each call costs one ``if``.

Invariants:
    * the tuple of sinks is replaced, never modified, so that emitting needs no lock;
    * a span goes to the sinks that existed when it began;
    * an event's rank is that of the emitting thread (ranks may be threads), or by default that of the process.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from types import TracebackType
from typing import Any, TypeVar

from npuzero.observe.events import Count, Event, Instant, Span
from npuzero.observe.sinks import Sink

_SinkType = TypeVar("_SinkType", bound=Sink)

_sinks: tuple[Sink, ...] = ()
_change = threading.Lock()
_thread = threading.local()
_process_rank = 0


def enabled() -> bool:
    """Return whether any sink exists. Ask before computing costly facts."""
    return bool(_sinks)


def add_sink(sink: Sink) -> None:
    """Send every event from now on to ``sink`` as well."""
    global _sinks
    with _change:
        _sinks = (*_sinks, sink)


def remove_sink(sink: Sink) -> None:
    """Stop sending events to ``sink``, which stays open. Does nothing if it was not added."""
    global _sinks
    with _change:
        _sinks = tuple(other for other in _sinks if other is not sink)


@contextmanager
def recording(sink: _SinkType) -> Iterator[_SinkType]:
    """Add ``sink`` during a ``with`` block, then remove and close it.

    The sink's data remain available::

        with observe.recording(observe.Counters()) as counters:
            train()
        print(counters.totals)
    """
    add_sink(sink)
    try:
        yield sink
    finally:
        remove_sink(sink)
        sink.close()


def set_rank(rank: int, *, process: bool = False) -> None:
    """Set the rank of this thread's events; with ``process``, of all threads that have not set one."""
    global _process_rank
    if process:
        _process_rank = rank
    else:
        _thread.rank = rank


def current_rank() -> int:
    """Return the rank of this thread's events."""
    return getattr(_thread, "rank", _process_rank)


def emit(event: Event) -> None:
    """Send a finished event to the sinks, for work with ends known only afterwards, such as a collective."""
    for sink in _sinks:
        sink.write(event)


def span(category: str, name: str, *, rank: int | None = None, **facts: Any) -> AbstractContextManager[object]:
    """Observe the ``with`` block as a :class:`Span`; see there for the arguments."""
    if not _sinks:
        return _NOTHING
    return _LiveSpan(category, name, current_rank() if rank is None else rank, facts)


def instant(category: str, name: str, *, rank: int | None = None, **facts: Any) -> None:
    """Observe this moment as an :class:`Instant`."""
    if _sinks:
        emit(Instant(category, name, time.perf_counter(), current_rank() if rank is None else rank, facts))


def count(category: str, name: str, value: float, *, rank: int | None = None) -> None:
    """Observe the new value of a quantity as a :class:`Count`."""
    if _sinks:
        emit(Count(category, name, time.perf_counter(), current_rank() if rank is None else rank, value))


class _NullSpan(AbstractContextManager[object]):
    """Do nothing: the span without a sink."""

    def __enter__(self) -> _NullSpan:
        return self

    def __exit__(self, *_: object) -> None:
        return None


_NOTHING = _NullSpan()


class _LiveSpan(AbstractContextManager[object]):
    """Time a ``with`` block, and send its span to the sinks that existed when it began."""

    def __init__(self, category: str, name: str, rank: int, facts: dict[str, Any]) -> None:
        self._what = (category, name)
        self._rank = rank
        self._facts = facts
        self._sinks = _sinks
        self._begin_s = 0.0

    def __enter__(self) -> _LiveSpan:
        for sink in self._sinks:
            sink.begin(*self._what)
        self._begin_s = time.perf_counter()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        end_s = time.perf_counter()
        facts = self._facts if kind is None else {**self._facts, "error": kind.__name__}
        event = Span(*self._what, self._begin_s, end_s, self._rank, facts)
        for sink in reversed(self._sinks):
            sink.end()
            sink.write(event)
