"""The forecast of which unit computes next."""

from __future__ import annotations

from npuzero.shard.parameters.prefetch import ExecutionTrace


def build_trace(*passes: list[int]) -> ExecutionTrace:
    """A trace with some whole passes behind it, and a new one begun. The first unit of each spans the others."""
    trace = ExecutionTrace()
    for units in passes:
        trace.begin()
        trace_units(trace, *units)
    trace.begin()
    return trace


def trace_units(trace: ExecutionTrace, root: int, *inner: int) -> None:
    """Run ``root``, and within it the others one after another."""
    trace.record(root)
    for unit in inner:
        trace.record(unit)
        trace.record_end(unit)
    trace.record_end(root)


def test_the_first_pass_has_no_forecast() -> None:
    trace = build_trace()
    trace.record(0)
    assert trace.after(0, 3) == []


def test_forward_follows_the_last_pass() -> None:
    trace = build_trace([0, 1, 2, 3])
    trace.record(0)
    assert trace.after(0, 1) == [1]
    trace.record(1)
    assert trace.after(1, 2) == [2, 3]
    assert trace.after(1, 0) == []
    assert trace.after(3, 5) == [] and trace.after(9, 5) == []


def test_backward_is_the_present_pass_reversed() -> None:
    trace = build_trace([0, 1, 2, 3])
    trace_units(trace, 0, 2, 3)
    assert trace.before(3, 1) == [2], "a unit that this pass left out is not foretold"
    assert trace.before(2, 5) == []
    assert trace.before(0, 2) == [3, 2], "after the loss's unit, the last"


def test_backward_reaches_a_unit_before_those_inside_of_it() -> None:
    trace = build_trace()
    trace.record(0)
    trace_units(trace, 1, 2, 3)  # a block with two tiles
    trace_units(trace, 4)
    trace.record_end(0)
    assert trace.before(0, 9) == [4, 1, 3, 2]
    assert trace.before(1, 1) == [3]


def test_without_a_present_pass_backward_takes_the_last() -> None:
    assert build_trace([0, 1, 2]).before(2, 5) == [1]


def test_an_empty_pass_does_not_erase_the_forecast() -> None:
    trace = build_trace([0, 1, 2])
    trace.begin()
    trace.record(0)
    assert trace.after(0, 1) == [1]


def test_units_that_run_twice_are_told_apart_by_position() -> None:
    trace = build_trace([0, 1, 2, 1, 3])
    for unit in (0, 1):
        trace.record(unit)
    assert trace.after(1, 1) == [2]
    for unit in (2, 1):
        trace.record(unit)
    assert trace.after(1, 1) == [3], "the second time round"


def test_a_forecast_names_no_unit_twice_nor_the_present_one() -> None:
    trace = build_trace([0, 1, 1, 2, 1, 2, 3])
    trace.record(0)
    trace.record(1)
    assert trace.after(1, 5) == [2, 3]


def test_another_order_than_last_time_is_found_again() -> None:
    trace = build_trace([0, 1, 2, 3])
    for unit in (0, 3, 1):
        trace.record(unit)
    assert trace.after(1, 1) == [2]
