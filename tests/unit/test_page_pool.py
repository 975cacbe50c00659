"""A pool of pages lends them: never twice, never more than it must have."""

from __future__ import annotations

import random

from npuzero.memory import PagePool, PageRun
from npuzero.plan import round_up_pages

PAGE = round_up_pages(1)


def make_page_pool() -> tuple[PagePool, list[int]]:
    segments: list[int] = []

    def extend(lacking: int) -> int:
        segments.append(lacking)
        return lacking

    return PagePool(extend), segments


def count_run_pages(runs: list[PageRun]) -> int:
    return sum(run.end - run.begin for run in runs)


def pages_of_runs(runs: list[PageRun]) -> set[tuple[int, int]]:
    return {(run.segment, at) for run in runs for at in range(run.begin, run.end, PAGE)}


def test_a_steady_step_extends_nothing() -> None:
    pool, segments = make_page_pool()
    for _ in range(5):
        lent = [pool.take(3 * PAGE - 5) for _ in range(4)]
        assert [len(runs) for runs in lent] == [1] * 4
        for runs in lent:
            pool.give(runs)
    assert segments == [3 * PAGE] * 4


def test_whatever_sizes_come_it_is_as_large_as_what_was_lent_at_most() -> None:
    pool, segments = make_page_pool()
    draw = random.Random(0)
    lent: list[list[PageRun]] = []
    now = most = 0
    for _ in range(3000):
        if lent and draw.random() < 0.5:
            runs = lent.pop(draw.randrange(len(lent)))
            now -= count_run_pages(runs)
            pool.give(runs)
        else:
            nbytes = draw.randrange(1, 40 * PAGE)
            runs = pool.take(nbytes)
            assert count_run_pages(runs) == round_up_pages(nbytes)
            assert not any(pages_of_runs(runs) & pages_of_runs(others) for others in lent)
            lent.append(runs)
            now += count_run_pages(runs)
        most = max(most, now)
        assert sum(segments) == most


def test_pieces_that_come_back_become_one_again() -> None:
    pool, segments = make_page_pool()
    first = pool.take(8 * PAGE)
    pool.give(first)
    parts = [pool.take(PAGE) for _ in range(8)]
    for i in (3, 0, 7, 1, 2, 6, 5, 4):
        pool.give(parts[i])
    assert pool.take(8 * PAGE) == first
    assert segments == [8 * PAGE]
