"""Schedules of a pipeline: each action once and in its place, no deadlock, bubbles and peaks exactly by formula."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from fractions import Fraction
from functools import cache
from itertools import pairwise
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from npuzero.errors import ConfigError
from npuzero.parallel.pipeline_parallel.schedule import (
    NAMES,
    PipelineSchedule,
    ScheduleTimeline,
    StageAction,
    TimedAction,
    schedule,
    simulate,
)

made = cache(schedule)


@cache
def simulate_schedule(*given: object) -> ScheduleTimeline:
    return simulate(made(*given))  # type: ignore[arg-type]


def schedule_grid(name: str) -> Iterator[PipelineSchedule]:
    """Yield all schedules of ``name`` for 1..8 ranks, 1..32 micro-batches and, if supported, 2..4 chunks."""
    for p in range(1, 9):
        for v in (2, 3, 4) if name == "interleaved" else (1,):
            for m in range(1, 33):
                if v == 1 or m % p == 0:
                    yield made(name, p, m, v)


@pytest.mark.parametrize("name", NAMES)
def test_each_act_runs_once_on_its_rank_and_after_what_it_takes(name):
    for table in schedule_grid(name):
        kinds = "FIW" if name == "zero-bubble" else "FB"
        acts = [act for row in table.table for act in row]
        once = {
            StageAction(kind, stage, i)
            for kind in kinds
            for stage in range(table.stages)
            for i in range(table.micro_batches)
        }
        assert len(acts) == len(once) and set(acts) == once
        timeline = simulate_schedule(name, table.ranks, table.micro_batches, table.chunks)  # no deadlock
        ended = {timed.act: timed.end for timed in timeline.acts}
        for rank, row in enumerate(timeline.rows):
            assert tuple(timed.act for timed in row) == table.row(rank)
            assert all(act.stage % table.ranks == rank for act in table.row(rank))
            assert all(before.end <= after.begin for before, after in pairwise(row))
        for _, (kind, stage, i), begin, _ in timeline.acts:
            if stage and kind == "F":
                assert ended[StageAction("F", stage - 1, i)] <= begin
            if kind in "BI":
                assert ended[StageAction("F", stage, i)] <= begin
                assert stage == table.stages - 1 or ended[StageAction(kind, stage + 1, i)] <= begin
            if kind == "W":
                assert ended[StageAction("I", stage, i)] <= begin


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "interleaved"])
def test_the_bubble_is_exact_also_with_fewer_micro_batches_than_ranks(name):
    for table in schedule_grid(name):
        p, m, v = table.ranks, table.micro_batches, table.chunks
        assert simulate_schedule(name, p, m, v).bubble == Fraction(p - 1, v * m + p - 1), (p, m, v)


def test_peaks_are_exact():
    for p, m in ((p, m) for p in range(1, 9) for m in range(1, 33)):
        assert simulate_schedule("gpipe", p, m, 1).peak == (m,) * p
        assert simulate_schedule("1f1b", p, m, 1).peak == tuple(min(m, p - r) for r in range(p))
        assert simulate_schedule("zero-bubble", p, m, 1).peak == (min(m, p),) * p
    for table in schedule_grid("interleaved"):
        p, m, v = table.ranks, table.micro_batches, table.chunks
        peaks = [min(v * m, 2 * (p - r - 1) + (v - 1) * p + 1) for r in range(p)]
        assert [table.peak(r) for r in range(p)] == peaks, (p, m, v)


def test_zero_bubble_waits_for_a_third_as_long_as_1f1b_with_no_larger_peak():
    """Each rank may keep as many micro-batches as 1f1b's first rank. With fewer micro-batches than ranks, there are
    not enough weight gradients to fill the end: then it is 2(m+p)-1 long.
    """
    for p, m in ((p, m) for p in range(1, 9) for m in range(1, 33)):
        plain, split = made("1f1b", p, m, 1), simulate_schedule("zero-bubble", p, m, 1)
        makespan = split.makespan
        assert makespan == max(3 * m + p - 1, 2 * (m + p) - 1), (p, m)
        assert split.bubble == 1 - Fraction(3 * m) / Fraction(makespan)
        assert (split.bubble < plain.bubble) is (p > 1)
        assert max(split.peak) == max(map(plain.peak, range(p)))


def test_interleaved_with_one_chunk_is_1f1b():
    assert schedule("interleaved", 4, 6) == schedule("1f1b", 4, 6)


def test_small_tables_by_hand():
    def rows(*given: object) -> list[str]:
        table = schedule(*given).table  # type: ignore[arg-type]
        return [" ".join(f"{kind}{stage}.{micro}" for kind, stage, micro in row) for row in table]

    assert rows("gpipe", 2, 2) == ["F0.0 F0.1 B0.0 B0.1", "F1.0 F1.1 B1.0 B1.1"]
    assert rows("1f1b", 2, 3) == ["F0.0 F0.1 B0.0 F0.2 B0.1 B0.2", "F1.0 B1.0 F1.1 B1.1 F1.2 B1.2"]
    assert rows("interleaved", 2, 2, 2) == [
        "F0.0 F0.1 F2.0 F2.1 B2.0 B2.1 B0.0 B0.1",
        "F1.0 F1.1 F3.0 B3.0 F3.1 B3.1 B1.0 B1.1",
    ]
    assert rows("zero-bubble", 2, 2) == ["F0.0 F0.1 I0.0 W0.0 I0.1 W0.1", "F1.0 I1.0 F1.1 I1.1 W1.0 W1.1"]


# -- torch's tables ----------------------------------------------------------------------------------------------------


def torch_schedule_table(name: str, p: int, m: int, v: int) -> tuple[tuple[StageAction, ...], ...]:
    """Stand in for a schedule of torch.distributed.pipelining to make its table: the methods need no process group."""
    schedules = pytest.importorskip("torch.distributed.pipelining.schedules")
    rounds = max(1, m // p)
    facts = SimpleNamespace(
        _num_stages=p, _n_microbatches=m, pp_group_size=p, n_local_stages=v, microbatches_per_round=m // rounds
    )
    if name in ("gpipe", "1f1b"):
        table = {"gpipe": schedules.ScheduleGPipe, "1f1b": schedules.Schedule1F1B}[name]._get_pipeline_order(facts)
    else:
        several, split = schedules.ScheduleInterleaved1F1B, schedules.ScheduleInterleavedZeroBubble
        kind = split if name == "zero-bubble" else several
        table = {rank: kind._calculate_single_rank_operations(facts, rank) for rank in range(p)}
    kinds = {"F", "B", "I", "W"}
    return tuple(
        tuple(
            StageAction(act.computation_type.value, act.stage_index, act.microbatch_index)
            for act in table[rank]
            if act is not None and act.computation_type.value in kinds
        )
        for rank in range(p)
    )


@pytest.mark.parametrize("name", NAMES)
def test_tables_are_torchs_but_where_those_are_wrong(name):
    """torch's 1F1B is wrong on the last rank, and where a rank would run more forwards ahead than there are."""
    for table in schedule_grid(name):
        p, m, v = table.ranks, table.micro_batches, table.chunks
        if name == "zero-bubble" and m > p and m % p:
            continue  # torch supports only numbers of micro-batches that rounds divide
        for rank, row in enumerate(torch_schedule_table(name, p, m, v)):
            if name != "1f1b" or (rank < p - 1 and p - 1 - rank <= m):
                assert table.row(rank) == row, (p, m, v, rank)


@pytest.mark.parametrize(("p", "m"), [(2, 4), (4, 8), (4, 2)])
def test_torchs_1f1b_skips_the_last_ranks_first_micro_batch_and_ours_does_not(p, m):
    """If it ran no forward ahead, it counts on from micro-batch 0 as if it had: forwards 1..m instead of 0..m-1."""
    *_, last = torch_schedule_table("1f1b", p, m, 1)
    ours = schedule("1f1b", p, m)
    assert [act.micro for act in last if act.kind == "F"] == list(range(1, m + 1))
    assert [act.micro for act in ours.row(p - 1) if act.kind == "F"] == list(range(m))
    mended = tuple(act._replace(micro=act.micro - (act.kind == "F")) for act in last)
    assert mended == ours.row(p - 1)
    with pytest.raises(ConfigError, match=f"rank {p - 1} at B of stage {p - 1} #0 for F of stage {p - 1} #0"):
        simulate(replace(ours, table=(*ours.table[:-1], tuple(act for act in last if act.micro < m))))


# -- simulation --------------------------------------------------------------------------------------------------------

times = st.fractions(min_value=Fraction(1, 8), max_value=8, max_denominator=8)
drawn = st.sampled_from(NAMES).flatmap(
    lambda name: st.builds(
        lambda p, m, v: schedule(name, p, m * p if v > 1 else m, v),
        st.integers(1, 6),
        st.integers(1, 12),
        st.integers(1, 3 if name == "interleaved" else 1),
    )
)


@settings(max_examples=60, deadline=None)
@given(drawn, times, times)
def test_each_act_begins_as_early_as_it_can_whatever_acts_take(table, forward, backward):
    timeline = simulate(table, forward, backward)
    ended = {timed.act: timed.end for timed in timeline.acts}
    for row in timeline.rows:
        free = Fraction(0)
        for _, act, begin, end in row:
            assert begin == max([free, *(ended[need] for need in table.needs(act))])
            free = end
    work = table.chunks * table.micro_batches * (forward + backward)
    assert timeline.busy == (work,) * table.ranks
    assert timeline.bubble == 1 - work / timeline.makespan
    assert timeline.peak == tuple(map(table.peak, range(table.ranks)))
    assert simulate(table, 3 * forward, 3 * backward).makespan == 3 * timeline.makespan


def test_gradients_of_weights_may_take_another_share_of_a_backward():
    table = schedule("zero-bubble", 4, 8)
    longer = simulate(table, 1, 2, weights=0)
    assert longer.makespan == simulate(schedule("1f1b", 4, 8)).makespan
    assert {timed.act.kind: timed.end - timed.begin for timed in longer.acts} == {"F": 1, "I": 2, "W": 0}


def test_a_timeline_may_be_one_that_ran():
    acts = (
        TimedAction(0, StageAction("F", 0, 0), 5.0, 6.0),
        TimedAction(1, StageAction("F", 1, 0), 6.5, 7.5),
        TimedAction(1, StageAction("B", 1, 0), 7.5, 9.0),
    )
    timeline = ScheduleTimeline(acts)
    assert (timeline.makespan, timeline.busy, timeline.peak) == (4.0, (1.0, 2.5), (1, 1))
    assert timeline.bubble == 1 - Fraction(35, 80)


def test_a_deadlock_says_who_waits_for_what():
    table = schedule("1f1b", 2, 1)
    crossed = replace(table, table=(table.row(0), tuple(reversed(table.row(1)))))
    with pytest.raises(
        ConfigError, match="a deadlock: rank 0 at B of stage 0 #0 for B of stage 1 #0; rank 1 at B"
    ) as error:
        simulate(crossed)
    assert "Order the acts" in error.value.do


# -- what is refused ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "says"),
    [
        (("1f1d", 4, 8), r"expected one of gpipe, 1f1b.*got '1f1d'\. Did you mean '1f1b'\?"),
        (("magic", 4, 8), r"got 'magic'\. Choose one\."),
        (("1f1b", 0, 8), "schedule: ranks: expected a positive integer; got 0"),
        (("1f1b", 4, 0), "schedule: micro_batches: expected a positive integer; got 0"),
        (("1f1b", 4, 2.0), "schedule: micro_batches: expected a positive integer; got 2.0"),
        (("interleaved", 4, 8, True), "schedule: chunks: expected a positive integer; got True"),
        (("interleaved", 4, 6, 2), r"'interleaved': expected .* its 4 ranks divide; got 6\. Use 8 micro-batches"),
        (("gpipe", 4, 8, 2), r"'gpipe': expected chunks=1.*; got chunks=2\. Use \"interleaved\""),
        (("1f1b", 4, 8, 2), r"'1f1b': expected chunks=1.*; got chunks=2\. Use \"interleaved\""),
        (("zero-bubble", 4, 8, 2), r"'zero-bubble': expected chunks=1.*; got chunks=2\. Use \"interleaved\""),
    ],
)
def test_what_cannot_be_is_refused_by_name(given, says):
    with pytest.raises(ConfigError, match=says):
        schedule(*given)


@pytest.mark.parametrize("given", [(-1, 2), (0, 0), (1, 2, 3), (1, 2, -1)])
def test_times_that_cannot_be_are_refused(given):
    with pytest.raises(ConfigError, match="weights at most backward"):
        simulate(schedule("1f1b", 2, 2), *given)
