"""Rounds, ratios and when to stop, under a clock that the tests turn."""

from __future__ import annotations

import math

import pytest
import torch

from npuzero.bench import (
    Benchmark,
    Contender,
    Effort,
    check_close,
    check_equal,
    local_contender,
    median,
    run_benchmark,
    summarize,
)
from npuzero.errors import BenchmarkError


class ManualClock:
    """Time that passes only when somebody works."""

    def __init__(self) -> None:
        self.now_s, self.visits = 0.0, []

    def __call__(self) -> float:
        return self.now_s

    def contender(self, name, seconds):
        """One whose calls take ``seconds`` of the visit's number, all told."""
        count = iter(range(10**6))

        def visit(calls):
            once = seconds(next(count)) if callable(seconds) else seconds
            self.visits.append((name, calls))
            self.now_s += calls * once
            return once

        return Contender(name, visit, nbytes=1000)


def make_benchmark(*contenders, check=lambda: "values equal"):
    return Benchmark("b", "title", contenders, contenders[0].name, check, {"n": 1})


def test_median_mad_and_error():
    assert median([3.0, 1.0, 2.0, 10.0]) == 2.5
    found = summarize([1.0, 2.0, 3.0, 4.0, 100.0])
    assert (found.median, found.mad) == (3.0, 1.0)
    assert found.error == pytest.approx(1.4826 * math.sqrt(math.pi / 2) / 3 / math.sqrt(5))
    assert summarize([2.0, 2.0]).error == 0.0
    assert summarize([2.0]).error == math.inf


def test_ratios_are_taken_within_a_round():
    clock = ManualClock()
    slow_half = lambda visit: 2.0 if visit % 2 else 1.0  # noqa: E731  the machine's two modes
    effort = Effort(least_rounds=6, warm_up=2, visit_s=0.0)
    result = run_benchmark(
        make_benchmark(clock.contender("a", slow_half), clock.contender("b", lambda visit: slow_half(visit) / 2)),
        effort,
        clock=clock,
    )
    assert result.speedup("b").median == 2.0 and result.speedup("b").mad == 0.0
    assert result.slowdown("b").median == 0.5 and result.share("b", "a").median == 2.0
    assert len(result.seconds["a"]) == 6 and result.ended_by == "spread"


def test_each_round_visits_all_and_the_order_changes():
    clock = ManualClock()
    effort = Effort(least_rounds=20, most_rounds=20, most_s=1e9, error=-1.0)
    run_benchmark(make_benchmark(*(clock.contender(name, 1.0) for name in "abc")), effort, clock=clock)
    names = [name for name, _ in clock.visits[-60:]]
    rounds = [tuple(names[at : at + 3]) for at in range(0, 60, 3)]
    assert all(sorted(each) == ["a", "b", "c"] for each in rounds)
    assert len(set(rounds)) > 3


def test_a_visit_makes_as_many_calls_as_fill_its_time():
    clock = ManualClock()
    effort = Effort(least_rounds=2, visit_s=1.0)
    result = run_benchmark(make_benchmark(clock.contender("a", 0.1), clock.contender("b", 5.0)), effort, clock=clock)
    assert result.calls == {"a": 10, "b": 1}
    assert run_benchmark(make_benchmark(clock.contender("a", 0.1)), Effort(warm_up=0), clock=clock).calls == {"a": 1}


@pytest.mark.parametrize(
    ("effort", "ended_by", "rounds"),
    [
        (Effort(least_rounds=4, most_rounds=50, most_s=1e9, error=1.0), "spread", 4),
        (Effort(least_rounds=4, most_rounds=12, most_s=1e9, error=1e-9), "rounds", 12),
        (Effort(least_rounds=4, most_rounds=50, most_s=29.0, error=1e-9, visit_s=1.0), "time", 6),
    ],
)
def test_rounds_end_by_spread_rounds_or_time(effort, ended_by, rounds):
    clock = ManualClock()
    noisy = clock.contender("b", lambda visit: 4.0 + visit % 3 * 0.1)
    result = run_benchmark(make_benchmark(clock.contender("a", 1.0), noisy), effort, clock=clock)
    assert (result.ended_by, len(result.seconds["b"])) == (ended_by, rounds)


def test_all_ranks_decide_by_the_slowest():
    clock = ManualClock()
    result = run_benchmark(
        make_benchmark(clock.contender("a", 1.0)),
        Effort(least_rounds=3, most_s=8.5),
        combine=lambda values: [value + 7.0 for value in values],
        clock=clock,
    )
    assert result.seconds["a"] == [8.0, 8.0] and result.ended_by == "time"


def test_a_failing_check_is_found_before_anything_is_timed():
    clock = ManualClock()
    wrong = lambda: check_equal("b", torch.ones(3), torch.zeros(3))  # noqa: E731
    with pytest.raises(BenchmarkError, match="check of b: expected the reference within 0; got 1 apart"):
        run_benchmark(make_benchmark(clock.contender("a", 1.0), check=wrong), Effort(), clock=clock)
    assert clock.visits == []


def test_checks():
    check_close("x", torch.tensor([1.0, 2.0]), torch.tensor([1.0, 2.01]), tolerance=0.01)
    for got in (torch.tensor([1.0, 2.1]), torch.tensor([1.0, math.nan]), torch.zeros(3)):
        with pytest.raises(BenchmarkError):
            check_close("x", got, torch.tensor([1.0, 2.0]), tolerance=0.01)


@pytest.mark.parametrize("names", [("a", "a"), ("b", "c")])
def test_contenders_have_different_names_and_the_baseline_is_one_of_them(names):
    clock = ManualClock()
    wrong = Benchmark("b", "t", [clock.contender(name, 1.0) for name in names], "a", lambda: "")
    with pytest.raises(BenchmarkError, match="contenders of different names"):
        run_benchmark(wrong, Effort(), clock=clock)


def test_a_local_contender_prepares_outside_its_time():
    clock, calls = ManualClock(), []

    def work() -> None:
        clock.now_s += 2.0
        calls.append("work")

    def prepare() -> None:
        clock.now_s += 100.0
        calls.append("prepare")

    assert local_contender("a", work, prepare=prepare, clock=clock).visit(3) == 2.0
    assert calls == ["prepare", "work", "work", "work"]
