"""Pool memory in pages. An allocation may consist of several runs of pages, and freed pages are reused.

So for any sequence of sizes the pool grows only to the peak of the allocated pages (rounded up to segments), since no
hole is too small to use. A step like the previous one allocates nothing.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from typing import NamedTuple

from npuzero.plan import round_up_pages


class PageRun(NamedTuple):
    """Identify consecutive pages: bytes ``[begin, end)`` of a segment."""

    segment: int
    begin: int
    end: int


class PagePool:
    """Allocate runs of pages from segments, and request a new segment if pages are lacking.

    Args:
        extend: called with the number of missing bytes; allocates a segment of at least that size, a multiple of a
            page, and returns its size. The first segment is number 0.
    """

    def __init__(self, extend: Callable[[int], int]) -> None:
        self._extend = extend
        self._segments = 0
        self._idle: list[PageRun] = []
        # Returned runs. Finalizers return them, so on any thread and at any time.
        self._returned: deque[PageRun] = deque()

    def take(self, nbytes: int) -> list[PageRun]:
        """Return runs of ``nbytes`` in total, rounded up to a page; a single run if one is long enough."""
        self._sort()
        nbytes = round_up_pages(nbytes)
        lacking = nbytes - sum(run.end - run.begin for run in self._idle)
        if lacking > 0:
            self._idle.append(PageRun(self._segments, 0, self._extend(lacking)))
            self._segments += 1
        taken = []
        while nbytes:
            run = next((run for run in self._idle if run.end - run.begin >= nbytes), self._idle[0])
            at = self._idle.index(run)
            middle = min(run.end, run.begin + nbytes)
            self._idle[at : at + 1] = [run._replace(begin=middle)] if middle < run.end else []
            taken.append(run._replace(end=middle))
            nbytes -= middle - run.begin
        return taken

    def give(self, runs: Iterable[PageRun]) -> None:
        """Return runs to the pool, from any thread."""
        self._returned.extend(runs)

    def _sort(self) -> None:
        """Sort returned runs into the idle ones, and join adjacent runs."""
        if not self._returned:
            return
        while self._returned:
            self._idle.append(self._returned.popleft())
        joined: list[PageRun] = []
        for run in sorted(self._idle):
            if joined and joined[-1].segment == run.segment and joined[-1].end == run.begin:
                joined[-1] = joined[-1]._replace(end=run.end)
            else:
                joined.append(run)
        self._idle = joined
