"""Events on their way to sinks. Without a sink each call costs one ``if``.

Invariants:
    * the tuple of sinks is replaced, never changed, so that emitting needs no lock;
    * a span goes to the sinks there were when it began;
    * the rank of an event is that of the thread that emits it (ranks may be threads), else that of the process.
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
    """Whether anybody listens: ask before computing facts that cost something."""
    return bool(_sinks)


def add_sink(sink: Sink) -> None:
    """Sends every event from now on to `sink` too."""
    global _sinks
    with _change:
        _sinks = (*_sinks, sink)


def remove_sink(sink: Sink) -> None:
    """Sends no further event to `sink`, which stays open; nothing happens if it was not added."""
    global _sinks
    with _change:
        _sinks = tuple(other for other in _sinks if other is not sink)


@contextmanager
def recording(sink: _SinkType) -> Iterator[_SinkType]:
    """Adds `sink` for the length of a ``with`` block, then removes and closes it."""
    add_sink(sink)
    try:
        yield sink
    finally:
        remove_sink(sink)
        sink.close()


def set_rank(rank: int, *, process: bool = False) -> None:
    """Says which rank this thread is; with `process`, which rank every thread is that did not say so itself."""
    global _process_rank
    if process:
        _process_rank = rank
    else:
        _thread.rank = rank


def current_rank() -> int:
    """The rank events of this thread carry."""
    return getattr(_thread, "rank", _process_rank)


def emit(event: Event) -> None:
    """Hands a finished event to the sinks: for work whose ends are known afterwards, as a collective's are."""
    for sink in _sinks:
        sink.write(event)


def span(category: str, name: str, *, rank: int | None = None, **facts: Any) -> AbstractContextManager[object]:
    """Observes the ``with`` block as a Span; see there for the arguments."""
    if not _sinks:
        return _NOTHING
    return _Live(category, name, current_rank() if rank is None else rank, facts)


def instant(category: str, name: str, *, rank: int | None = None, **facts: Any) -> None:
    """Observes this moment as an Instant."""
    if _sinks:
        emit(Instant(category, name, time.perf_counter(), current_rank() if rank is None else rank, facts))


def count(category: str, name: str, value: float, *, rank: int | None = None) -> None:
    """Observes the new value of a quantity."""
    if _sinks:
        emit(Count(category, name, time.perf_counter(), current_rank() if rank is None else rank, value))


class _Nothing(AbstractContextManager[object]):
    """The span nobody listens to."""

    def __enter__(self) -> _Nothing:
        return self

    def __exit__(self, *_: object) -> None:
        return None


_NOTHING = _Nothing()


class _Live(AbstractContextManager[object]):
    """A span that is open."""

    def __init__(self, category: str, name: str, rank: int, facts: dict[str, Any]) -> None:
        self._what = (category, name)
        self._rank = rank
        self._facts = facts
        self._sinks = _sinks
        self._begin_s = 0.0

    def __enter__(self) -> _Live:
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
