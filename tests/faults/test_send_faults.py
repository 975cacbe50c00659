"""A send that differs from its recv, is not received, or has a failing peer: an error on both ranks, in time."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from npuzero import comm
from npuzero.comm import World
from npuzero.errors import CollectiveError
from world.comm_ranks import run_comm_ranks

#: Seconds within which a rank must notice the fault of its peer.
NOTICED_S = 2.0


def stage_communicator(world: World) -> comm.Communicator:
    return world.communicator(range(world.size), "stages")


def met_on_threads(size: int, fn: Callable[[World], Any], timeout_s: float = 20.0) -> dict[int, CollectiveError]:
    """Return the CollectiveError of each rank."""
    met: dict[int, CollectiveError] = {}

    def body(world: World) -> None:
        try:
            fn(world)
        except CollectiveError as error:
            met[world.rank] = error
            time.sleep(0.5)  # so that no rank learns it from this rank's end

    comm.run_threads(size, body, timeout_s=timeout_s)
    return met


def caught_collective_error(call: Callable[[], object]) -> CollectiveError:
    with pytest.raises(CollectiveError) as met:
        call()
    return met.value


# --- ends that differ -------------------------------------------------------------------------------------------------

#: numel, dtype and tag of two sends, and of the two recvs that await them.
DIFFERENT = {
    "size": ([(12, "float32", "a"), (12, "float32", "b")], [(12, "float32", "a"), (13, "float32", "b")], 2),
    "size, larger than a slot": ([(900_000, "float32", "a")], [(800_000, "float32", "a")], 1),
    "nothing": ([(0, "float32", "a")], [(12, "float32", "a")], 1),
    "dtype": ([(12, "float32", "a")], [(12, "int32", "a")], 1),
    "tag": ([(12, "float32", "a")], [(12, "float32", "b")], 1),
    "order": ([(12, "float32", "a"), (12, "float32", "b")], [(12, "float32", "b"), (12, "float32", "a")], 1),
}


def errors_of_different_sends(world: World, case: str) -> list[tuple[str, str, str, int]]:
    """Return the errors of both ranks, and of their next calls: kind, text, tag and number."""
    group = stage_communicator(world)
    sends, recvs, _ = DIFFERENT[case]
    buffers = [
        (torch.zeros(numel, dtype=getattr(torch, dtype)), 1 - world.rank, tag)
        for numel, dtype, tag in (sends, recvs)[world.rank]
    ]

    def carry() -> None:
        handles = []
        with contextlib.suppress(CollectiveError):  # the second is refused at once if the first has failed by then
            for call in buffers:
                handles.append((group.recv if world.rank else group.send)(*call))
        for handle in handles:
            handle.wait()

    errors = [caught_collective_error(carry)]
    errors += [
        caught_collective_error(call)
        for call in (group.barrier, lambda: group.send(torch.ones(1), 1 - world.rank).wait())
    ]
    return [(e.facts["kind"], e.got, f"{e.facts['tag']} {e.subject}", e.facts["sequence"]) for e in errors]


def check_different_sends(case: str, seen: list[list[tuple[str, str, str, int]]]) -> None:
    sends, recvs, number = DIFFERENT[case]
    said = [f"send #{number} of {n} {dtype} tagged {tag!r}" for n, dtype, tag in (sends[number - 1], recvs[number - 1])]
    for rank, ((kind, got, about, sequence), *later) in enumerate(seen):
        assert kind == "mismatch" and sequence == number
        assert sorted(got.split("; ")) == [f"rank 0: {said[0]}", f"rank 1: {said[1]}"]
        tag = (sends, recvs)[rank][number - 1][2]
        assert f"{('send', 'recv')[rank]} #{number} tagged {tag!r} of 'stages' on rank {rank}" in about
        assert all(kind == "mismatch" and said == got for kind, said, *_ in later), "broken for good"


@pytest.mark.parametrize("case", DIFFERENT)
def test_ends_that_differ_are_named_on_both_ranks(case: str) -> None:
    check_different_sends(case, comm.run_threads(2, lambda world: errors_of_different_sends(world, case)))


@pytest.mark.world
@pytest.mark.parametrize(
    ("backend", "case"), [(None, "tag"), *(("gloo", case) for case in ("nothing", "dtype", "order"))]
)
def test_processes_whose_ends_differ(backend: str | None, case: str, tmp_path: Path) -> None:
    outcomes = run_comm_ranks(2, errors_of_different_sends, case, folder=tmp_path, backend=backend)
    for outcome in outcomes:
        assert outcome.error is None and outcome.exit_code == 0, outcome.trace
    check_different_sends(case, [outcome.value for outcome in outcomes])


def test_others_of_the_group_hear_of_it() -> None:
    """Rank 2 waits for rank 1, whose exchange with rank 0 has failed."""

    def body(world: World) -> None:
        group = stage_communicator(world)
        if world.rank < 2:
            errors_of_different_sends(world, "tag")
            time.sleep(1.0)
        else:
            group.recv(torch.ones(3), 1, "mine").wait()

    met = met_on_threads(3, body)
    assert met[2].facts["kind"] == "mismatch" and "tagged 'a'; rank 1: send #1" in met[2].got


# --- a rank that does not come ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("verb", ["send", "recv"])
def test_a_send_without_a_recv_ends_at_the_timeout(verb: str) -> None:
    late: list[CollectiveError] = []

    def body(world: World) -> None:
        group = stage_communicator(world)
        if world.rank:
            time.sleep(1.0)
            late.append(
                caught_collective_error(
                    lambda: (group.recv if verb == "send" else group.send)(torch.ones(4), 0, "x").wait()
                )
            )
        else:
            getattr(group, verb)(torch.ones(4), 1, "x").wait()

    (error,) = met_on_threads(2, body, timeout_s=0.4).values()
    assert error.facts["kind"] == late[0].facts["kind"] == "timeout"
    assert error.subject == f"{verb} #1 tagged 'x' of 'stages' on rank 0"
    assert "send #1 of 4 float32 tagged 'x' within 0.4 s" in error.expected and "waits for rank 1" in error.got


@pytest.mark.parametrize("size", [2, 3])
def test_ranks_that_all_receive_first_are_told_so(size: int) -> None:
    """Every rank of a ring receives first: no rank would ever send."""
    begin = time.monotonic()
    met = met_on_threads(
        size,
        lambda world: stage_communicator(world).recv(torch.ones(4), (world.rank + 1) % size, f"x{world.rank}").wait(),
    )
    assert time.monotonic() - begin < 5 + NOTICED_S
    assert sorted(met) == list(range(size))
    for error in met.values():
        assert error.facts["kind"] == "diverged"
        assert all(f"waits in recv #1 tagged 'x{rank}' of 'stages'" in error.got for rank in range(size)), error.got


def test_a_send_is_where_it_was_started() -> None:
    """The board must not report a rank as missing that has sent, and waits for another operation."""

    def body(world: World) -> dict[str, int]:
        group = stage_communicator(world)
        call = group.recv if world.rank else group.send
        handles = [call(torch.ones(4), 1 - world.rank, "x") for _ in range(3)]
        for handle in handles:
            handle.wait()
        group.barrier()
        return group.arrived()

    here, there = comm.run_threads(2, body)
    assert here == there and sorted(here.values()) == [1, 3]


# --- a rank that fails ------------------------------------------------------------------------------------------------


def test_an_exception_frees_whoever_sends_or_receives() -> None:
    kinds: dict[int, str] = {}

    def body(world: World) -> None:
        group = stage_communicator(world)
        if world.rank == 1:
            group.send(torch.ones(1_000_000), 0, "never received")
            raise KeyError("mine")
        call = group.send if world.rank else group.recv
        kinds[world.rank] = str(caught_collective_error(lambda: call(torch.ones(9), 1, "x").wait()).facts["kind"])

    begin = time.monotonic()
    with pytest.raises(KeyError, match="mine"):
        comm.run_threads(3, body)
    assert time.monotonic() - begin < NOTICED_S + 1
    assert kinds.keys() == {0, 2} and set(kinds.values()) <= {"aborted", "closed", "mismatch"}


@pytest.mark.parametrize("how", ["abort", "close"])
def test_who_waits_for_a_rank_that_gives_up_is_told(how: str) -> None:
    """Rank 0 has not sent yet, nor opened a channel."""
    told_s: list[float] = []

    def body(world: World) -> None:
        group = stage_communicator(world)
        if world.rank == 0:
            time.sleep(0.3)
            group.abort("no memory left") if how == "abort" else group.close()
            time.sleep(1.5 if how == "abort" else 0.0)
            group.send(torch.ones(4), 1, "x").wait()
        begin_s = time.monotonic()
        try:
            group.recv(torch.ones(4), 0, "x").wait()
        finally:
            told_s.append(time.monotonic() - begin_s)

    met = met_on_threads(2, body)
    assert sorted(met) == [0, 1] and told_s[0] < 1.5
    kind = "aborted" if how == "abort" else "closed"
    assert all(error.facts["kind"] == kind and error.facts["tag"] == "x" for error in met.values())


def test_a_rank_that_ends_with_sends_under_way_finishes_them() -> None:
    def body(world: World) -> float:
        group = stage_communicator(world)
        buffer = torch.zeros(1_000_000)
        if world.rank:
            time.sleep(0.3)
            group.recv(buffer, 0, "last").wait()
        else:
            group.send(buffer + 1, 1, "last")
        return float(buffer.sum())

    assert comm.run_threads(2, body) == [0, 1_000_000]


def killed_in_send(world: World, in_place: bool) -> tuple[float, str, str]:
    """Kill rank 1 while rank 0 sends to it and receives from it in a loop."""
    group = stage_communicator(world)
    n = 1 << 18
    out, back = (group.buffer(n, torch.float32) if in_place else torch.ones(n) for _ in range(2))
    group.barrier()
    if world.rank == 1:
        threading.Timer(0.3, lambda: os.kill(os.getpid(), signal.SIGKILL)).start()
    peer = 1 - world.rank
    try:
        while True:
            handles = [group.send(out, peer, "out") for _ in range(3)]
            for _ in range(3):
                group.recv(back, peer, "out").wait()
            for handle in handles:
                handle.wait()
    except CollectiveError as error:
        return time.monotonic(), str(error.facts.get("kind")), str(error)


@pytest.mark.world
@pytest.mark.parametrize(("backend", "in_place"), [(None, False), (None, True), ("gloo", False)])
def test_killed_rank(backend: str | None, in_place: bool, tmp_path: Path) -> None:
    outcomes = run_comm_ranks(2, killed_in_send, in_place, folder=tmp_path, backend=backend, limit_s=30)
    assert outcomes[1].exit_code == -signal.SIGKILL
    assert outcomes[0].error is None and outcomes[0].exit_code == 0, outcomes[0].trace
    _, kind, text = outcomes[0].value
    assert "tagged 'out' of 'stages' on rank 0" in text
    assert "rank 1 is dead" in text or (kind != "dead" and backend == "gloo")


def killed_before_it_sends(world: World) -> tuple[float, float, str]:
    group = stage_communicator(world)
    group.barrier()
    at = time.monotonic() + 0.3
    if world.rank == 1:
        time.sleep(0.3)
        os.kill(os.getpid(), signal.SIGKILL)
    error = caught_collective_error(group.recv(torch.ones(10), 1, "x").wait)
    return at, time.monotonic(), error.got


@pytest.mark.world
def test_killed_rank_is_noticed_in_time(tmp_path: Path) -> None:
    outcomes = run_comm_ranks(2, killed_before_it_sends, folder=tmp_path, limit_s=30)
    assert outcomes[0].error is None, outcomes[0].trace
    killed_s, noticed_s, got = outcomes[0].value
    assert "rank 1 is dead; rank 1 has not opened this communicator" in got
    assert noticed_s - killed_s < NOTICED_S


def waits_elsewhere(world: World) -> tuple[str, float]:
    """Rank 0 waits for a send that rank 1 never makes, after a failed exchange of both."""
    group = stage_communicator(world)
    other = 1 - world.rank
    if world.rank:
        time.sleep(0.5)  # so that rank 0 waits already
        group.recv(torch.ones(3), other, "b")
        time.sleep(NOTICED_S + 1)  # so that rank 0 does not learn it from this rank's end
        return "", 0.0
    group.send(torch.ones(3), other, "a")
    begin = time.monotonic()
    error = caught_collective_error(group.recv(torch.ones(3), other, "never").wait)
    return str(error.facts.get("kind")), time.monotonic() - begin


@pytest.mark.world
def test_over_gloo_one_failure_ends_every_wait(tmp_path: Path) -> None:
    outcomes = run_comm_ranks(2, waits_elsewhere, folder=tmp_path, backend="gloo", timeout_s=20)
    assert outcomes[0].error is None, outcomes[0].trace
    kind, waited_s = outcomes[0].value
    assert kind == "mismatch" and waited_s < NOTICED_S
