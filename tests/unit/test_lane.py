"""Lanes: steps in order beside the caller, their errors, and what their owner says of waiting and of the door."""

from __future__ import annotations

import threading

import pytest
import torch

from npuzero.device import HostLane, make_lane


def raise_permission_error() -> None:
    raise PermissionError("not here")


def test_a_lane_keeps_order_and_errors():
    lane, seen = HostLane("test"), []
    handles = [lane.run(lambda k=k: seen.append(k)) for k in range(100)]
    failing = lane.run(lambda: 1 / 0)
    after = lane.run(lambda: seen.append(100))
    after.wait()
    assert seen == list(range(101)) and all(handle.done() for handle in handles)
    for _ in range(2):
        with pytest.raises(ZeroDivisionError):
            failing.wait()
    lane.close(1.0)


def test_a_lane_may_be_closed_by_a_step_of_its_own():
    """As finalizers do, which run on whichever thread collects garbage."""
    lane = HostLane("closing")
    closing, never = lane.run(lambda: lane.close(1.0)), []
    closing.wait()
    lane.run(lambda: never.append(1))
    for thread in threading.enumerate():
        if thread.name == "npuzero-closing":
            thread.join(10.0)
            assert not thread.is_alive()
    assert not never


def test_a_lane_takes_no_step_where_its_door_is_shut():
    seen = []
    lane = make_lane(torch.device("cpu"), "test", raise_permission_error)
    with pytest.raises(PermissionError, match="not here"):
        lane.run(lambda: seen.append(1))
    assert not seen and not any(thread.name == "npuzero-test" for thread in threading.enumerate())


def test_who_waits_spends_the_time_as_was_said():
    lane, gate, waited = HostLane("test"), threading.Event(), []

    def patience(event: threading.Event) -> None:
        waited.append(event.is_set())
        gate.set()
        event.wait()

    handle = lane.run(gate.wait, patience)
    handle.wait()
    handle.wait()  # done: nothing is to be waited for
    assert waited == [False] and handle.done()
    lane.close(1.0)


def test_what_is_in_vain_is_told_to_who_waits():
    lane, gate = HostLane("test"), threading.Event()

    def patience(event: threading.Event) -> None:
        raise TimeoutError("nobody comes")

    handle = lane.run(gate.wait, patience)
    with pytest.raises(TimeoutError, match="nobody comes"):
        handle.wait()
    gate.set()
    lane.close(1.0)
