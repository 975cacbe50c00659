"""A pool of pages: memory that is lent in whole pages, which need not lie in one place, and is used again.

So whatever sizes come and go, it is as large as what was lent at once at most, without holes too small to be of
use; a step like the one before allocates nothing.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from typing import NamedTuple

from npuzero.plan import round_up_pages


class PageRun(NamedTuple):
    """Name pages that follow each other: in which segment, and from and to which byte."""

    segment: int
    begin: int
    end: int


class PagePool:
    """Lend runs of pages out of segments, which it asks for as it needs more.

    Args:
        extend: called with the bytes that are lacking; allocates a segment that has them, of whole pages, and returns
            how many bytes it has. The first segment is number 0.
    """

    def __init__(self, extend: Callable[[int], int]) -> None:
        self._extend = extend
        self._segments = 0
        self._idle: list[PageRun] = []
        # What came back, from any thread and in the midst of anything: runs are given back as objects die.
        self._returned: deque[PageRun] = deque()

    def take(self, nbytes: int) -> list[PageRun]:
        """Return runs of ``nbytes`` in all, rounded up to whole pages; one run, wherever one is long enough."""
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
        """Take runs back; from any thread."""
        self._returned.extend(runs)

    def _sort(self) -> None:
        """Put what came back in its place, and join runs that touch."""
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
