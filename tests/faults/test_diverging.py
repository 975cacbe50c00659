"""Ranks that diverge and wait for each other: within seconds, each gets an error with the place of every rank.

Ranks are threads; some cases run on processes over shared memory and over gloo.
"""

from __future__ import annotations

import re
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from faults import diverging
from faults.diverging import CASES, CULPRIT
from faults.fault_ranks import ProcessOutcome, run_faulty_ranks
from npuzero import comm
from npuzero.comm import World
from npuzero.comm.watchdog.hang_detector import NOWHERE, PendingWait, RankStatus, Rendezvous, find_stuck_ranks
from npuzero.errors import CollectiveError, NpuZeroError

RANKS = 3
#: Seconds from the moment ranks wait for each other until all of them have the error.
NAMED_S = 5.0
#: Calls that a plan with unsharded parameters may make on one rank alone.
HARMLESS = {
    ("zero1", "evaluation on rank 0 only"),
    ("zero1", "full_state_dict on rank 0 only"),
    ("zero1", "another order of units"),
    ("zero1", "uneven micro-batches"),
}
#: The call left out by the remaining ranks, as the user knows it.
LEFT_OUT = {
    "save on rank 0 only": "checkpoint.save",
    "asynchronous save on rank 0 only": "checkpoint.save",
    "load on rank 0 only": "checkpoint.load",
    "export on rank 0 only": "export",
    "gathered() on rank 0 only": "gathered",
    "full_state_dict on rank 0 only": "full_state_dict",
    "load_full_state_dict on rank 0 only": "load_full_state_dict",
    "optimizer.state_dict on rank 0 only": "optimizer.state_dict",
    "world.mean on rank 0 only": "world.mean",
    "zero() of a second model on rank 0 only": "zero",
    "zero() on rank 0 only": "zero",
    "clipping on one rank": "clip_grad_norm_",
    "clipping by value on one rank": "clip_grad_value_",
    "skip_nonfinite_ on one rank": "skip_nonfinite_",
    "grad_norms on one rank": "grad_norms",
    "full_gradient on one rank": "full_gradient",
    "another step on one rank": "optimizer.step",
    "a step left out": "optimizer.step",
}
#: gloo compares nothing: it confuses units of equal sizes, and other sizes end the process within gloo.
NOT_SEEN_BY_GLOO = ("another order of units", "exception in a forward")
#: The most common cases, on real processes.
ON_PROCESSES = ("save on rank 0 only", "clipping on one rank", "a step left out", "uneven micro-batches")


def _errors_met(size: int, fault: Any, *args: Any) -> dict[int, tuple[BaseException, float]]:
    """Return the error of each of ``size`` threads, and the seconds until it."""
    met: dict[int, tuple[BaseException, float]] = {}

    def body(world: World) -> None:
        begin_s = time.monotonic()
        try:
            fault(world, *args)
        except BaseException as error:
            met[world.rank] = error, time.monotonic() - begin_s
            raise

    with pytest.raises(NpuZeroError):
        comm.run_threads(size, body)
    return met


@pytest.fixture(autouse=True)
def _one_thread_per_rank() -> Any:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize(
    ("plan", "case"),
    [
        pytest.param(plan, case, marks=() if plan == "zero3" else pytest.mark.slow)
        for plan in ("zero3", "zero1", "hsdp")
        for case in CASES
        if (plan, case) not in HARMLESS
    ],
)
def test_every_rank_is_told_where_all_are(plan: str, case: str) -> None:
    met = _errors_met(RANKS, CASES[case], plan)
    assert set(met) >= {0, 2}
    for error, after_s in met.values():
        assert isinstance(error, NpuZeroError), error
        assert after_s < NAMED_S + 5  # the first steps of a process are slow
        assert "timeout" not in error.facts.values()
        if isinstance(error, CollectiveError):
            named = (CULPRIT,) if error.facts["kind"] == "closed" else (0, CULPRIT)
            assert all(re.search(rf"rank (\d, )*{rank}", error.got) for rank in named), error.got
        alike = (plan, case) == ("zero1", "a step left out")  # all ranks are in a step; one is a step behind
        call = None if alike else LEFT_OUT.get(case)
        if call is not None:
            assert error.expected == f"{call} on every rank, since it is collective", error
            assert re.search(rf"rank (\d, )*\d:? (is )?in {re.escape(call)} at \w+\.py:\d+", error.got), error.got
            assert re.search(r"rank (\d, )*\d:? (is )?went on to .* without|waits in", error.got), error.got
            assert f"call {call} on every rank" in error.do


def test_the_text_says_what_was_called_where_and_since_when() -> None:
    met = _errors_met(RANKS, CASES["save on rank 0 only"], "zero3")
    assert sorted(met) == [0, 1, 2]
    for rank, (error, _) in met.items():
        assert isinstance(error, CollectiveError)
        assert error.facts["kind"] == "diverged"
        zero, others = error.got.split("; ")
        clock = r"since \d\d:\d\d:\d\d"
        where = r"at diverging.py:\d+"
        assert re.fullmatch(rf"rank 0: in checkpoint.save {where} \(exchange #\d+ of checkpoint\), {clock}", zero)
        assert re.match(r"rank 1, 2: went on to forward at toy.py:\d+ without checkpoint.save", others)
        assert re.search(rf"\(all_gather #\d+ tagged 'gather root' of 'gather'\), {clock}", others)
        assert error.subject.startswith(f"{'forward' if rank else 'checkpoint.save'} on rank {rank}, in ")


@pytest.mark.parametrize("fault", (diverging.in_a_ring,))
def test_groups_of_some_ranks(fault: Any) -> None:
    """No two ranks wait for each other, but all of them together form a cycle."""
    for error, _ in _errors_met(RANKS, fault, "").values():
        assert isinstance(error, CollectiveError)
        assert re.match("rank 0: waits in barrier #1 of 'neighbours' among rank 0, 1,", error.got)
        assert "rank 2: waits in barrier #1 of 'neighbours' among rank 0, 2" in error.got


def test_a_rank_that_computes_is_told_when_it_comes() -> None:
    def body(world: World) -> None:
        if world.rank == 2:
            time.sleep(2.0)
        if world.rank == 0:
            world.exchange(0)
        world.communicator(range(3), "ops").barrier()

    met = _errors_met(RANKS, body)
    assert sorted(met) == [0, 1, 2]
    for error, _ in met.values():
        assert "rank 2: does not wait, and may come" in str(error)


def test_the_world_is_broken_for_good() -> None:
    def body(world: World) -> None:
        first = world.exchange if world.rank else world.communicator(range(2), "ops").barrier
        with pytest.raises(CollectiveError) as met:
            first(*[0] * bool(world.rank))  # type: ignore[operator]
        for call in (lambda: world.exchange(1), world.communicator(range(2), "more").barrier):
            with pytest.raises(CollectiveError) as again:
                call()
            assert again.value.got == met.value.got

    comm.run_threads(2, body)


# --- no false alarm ---------------------------------------------------------------------------------------------------


def test_a_rank_that_is_late_is_waited_for() -> None:
    """A rank that computes while its peers wait in a collective or an exchange raises no alarm."""

    def body(world: World) -> list[float]:
        everyone = world.communicator(range(world.size), "ops")
        buffer = torch.ones(100)
        for turn in range(world.size):
            if world.rank == turn:
                time.sleep(1.7)
            everyone.all_reduce(buffer, tag="late").wait()
            if world.rank == (turn + 1) % world.size:
                time.sleep(1.2)
            world.exchange(turn)
        return [float(buffer[0])]

    assert comm.run_threads(3, body) == [[27.0]] * 3


def test_what_was_started_is_awaited_in_any_order() -> None:
    """Each rank waits for another of two operations; every rank has started or will start both."""

    def body(world: World) -> float:
        one, other = (world.communicator(range(2), name) for name in ("one", "other"))
        first, second = torch.ones(10), torch.ones(10)
        groups = ((one, first), (other, second)) if world.rank == 0 else ((other, second), (one, first))
        handles = [group.all_reduce(buffer) for group, buffer in groups]
        if world.rank == 1:
            time.sleep(1.5)
        for handle in handles:
            handle.wait()
        return float((first + second).sum())

    assert comm.run_threads(2, body) == [40.0, 40.0]


def test_a_thread_beside_the_main_one_may_still_come() -> None:
    """Rank 0 waits in two threads; on rank 1 one thread is late for the operation that the second wait depends on."""
    import threading

    def body(world: World) -> list[int]:
        got: list[int] = []

        def beside() -> None:
            with comm.entered(world):
                if world.rank == 1:
                    world.communicator(range(2), "known to the world")
                    time.sleep(2.0)
                got.extend(world.exchange(world.rank, "beside"))

        thread = threading.Thread(target=beside)
        thread.start()
        time.sleep(0.1)
        if world.rank == 1:
            world.exchange(0, "main")  # rank 0 arrives after the message from rank 1's thread
            thread.join()
        else:
            thread.join()
            world.exchange(0, "main")
        return got

    assert comm.run_threads(2, body) == [[0, 1], [0, 1]]


# --- the judgement ----------------------------------------------------------------------------------------------------


def _rank_status(meeting: Rendezvous, **arrived: int) -> RankStatus:
    return RankStatus((PendingWait(meeting, 0.0),), arrived)


def _meeting_at(place: str, number: int, *ranks: int) -> Rendezvous:
    return Rendezvous(place, number, ranks, place)


@pytest.mark.parametrize(
    ("slots", "found"),
    [
        ([_rank_status(_meeting_at("a", 1, 0, 1), a=1), NOWHERE], []),
        ([_rank_status(_meeting_at("a", 1, 0, 1), a=1), _rank_status(_meeting_at("b", 1, 0, 1), b=1)], [0, 1]),
        (
            [_rank_status(_meeting_at("a", 1, 0, 1), a=1), _rank_status(_meeting_at("b", 1, 0, 1), b=1, a=1)],
            [],
        ),  # rank 1 has started a
        (
            [_rank_status(_meeting_at("a", 2, 0, 1), a=2), _rank_status(_meeting_at("a", 1, 0, 1), a=1)],
            [],
        ),  # the first is about to be done
        (
            [_rank_status(_meeting_at("a", 2, 0, 1), a=2), _rank_status(_meeting_at("b", 1, 0, 1), b=1, a=1)],
            [0, 1],
        ),  # it has finished the first alone
        ([_rank_status(_meeting_at("a", 1, 0, 1), a=1), RankStatus((), {}, "has ended")], [0]),
        ([_rank_status(_meeting_at("a", 1, 0, 1), a=1), RankStatus((), {"a": 1}, "has ended")], []),
        ([_rank_status(_meeting_at("a", 1, 0, 1), a=1), _rank_status(_meeting_at("b", 1, 1, 2), b=1), NOWHERE], []),
        (
            [
                _rank_status(_meeting_at("a", 1, 0, 1), a=1),
                _rank_status(_meeting_at("b", 1, 1, 2), b=1),
                _rank_status(_meeting_at("c", 1, 0, 2), c=1),
            ],
            [0, 1, 2],
        ),
        ([_rank_status(_meeting_at("a", 1, 0, 1), a=1), _rank_status(_meeting_at("b", 1, 0, 1), b=1), NOWHERE], [0, 1]),
    ],
)
def test_who_is_stuck(slots: list[RankStatus], found: list[int]) -> None:
    assert find_stuck_ranks(slots) == found


# --- processes --------------------------------------------------------------------------------------------------------


@pytest.mark.world
@pytest.mark.parametrize(
    ("backend", "case"),
    [
        pytest.param(backend, case, marks=() if (backend, case) in quick else pytest.mark.slow)
        for quick in [{(None, "save on rank 0 only"), ("gloo", "a step left out")}]
        for backend in (None, "gloo")
        for case in (CASES if backend else ON_PROCESSES)
        if case not in ("other presets", *NOT_SEEN_BY_GLOO)
    ],
)
def test_on_processes(backend: str | None, case: str, tmp_path: Path) -> None:
    outcomes: list[ProcessOutcome] = run_faulty_ranks(
        diverging.run_case, RANKS, case, "zero3", timeout_s=20.0, backend=backend
    )
    for rank, outcome in enumerate(outcomes):
        assert outcome.exit_code == 0, f"rank {rank} hung"
        if outcome.seen.kind == "" and rank == CULPRIT:
            continue  # it has left
        assert "NpuZeroError" in outcome.seen.bases, f"rank {rank}: {outcome.seen.trace}"
        if outcome.seen.kind == "CollectiveError":
            assert outcome.seen.facts["kind"] in ("diverged", "mismatch", "closed", "dead"), outcome.seen.text
        assert outcome.seen.after_s < NAMED_S + 5
