"""A rank that dies, differs, is late, gives up or leaves: an error on every other rank in time, and no remains."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from npuzero import comm
from npuzero.comm import World
from npuzero.comm.backends import shared_memory
from npuzero.errors import CollectiveError
from world.comm_ranks import RankOutcome, run_comm_ranks

#: A dead rank must be noticed within this.
NOTICED_S = 2.0


def all_ranks_communicator(world: World, name: str = "all") -> comm.Communicator:
    return world.communicator(range(world.size), name)


def run_on_threads(size: int, fn: Callable[[World], Any], timeout_s: float = 20.0) -> dict[int, CollectiveError]:
    """Return the CollectiveError of each rank."""
    met: dict[int, CollectiveError] = {}

    def body(world: World) -> None:
        try:
            fn(world)
        except CollectiveError as error:
            met[world.rank] = error
            raise

    with pytest.raises(CollectiveError):
        comm.run_threads(size, body, timeout_s=timeout_s)
    return met


# --- ranks that differ ------------------------------------------------------------------------------------------------


def _another_verb(world: World, group: comm.Communicator) -> None:
    buffer = torch.ones(12)
    (group.all_reduce(buffer, tag="u") if world.rank != 1 else group.broadcast(buffer, root=0, tag="u")).wait()


def _another_size(world: World, group: comm.Communicator) -> None:
    group.all_reduce(torch.ones(12 if world.rank != 1 else 13)).wait()


def _another_dtype(world: World, group: comm.Communicator) -> None:
    group.all_reduce(torch.ones(12, dtype=torch.float32 if world.rank != 1 else torch.bfloat16)).wait()


def _another_tag(world: World, group: comm.Communicator) -> None:
    group.all_reduce(torch.ones(12), tag="blocks.0" if world.rank != 1 else "blocks.1").wait()


def _another_root(world: World, group: comm.Communicator) -> None:
    group.broadcast(torch.ones(12), root=0 if world.rank != 1 else 2).wait()


@pytest.mark.parametrize(
    ("fn", "said"),
    [
        (_another_verb, ("all_reduce #2 of 12 float32 tagged 'u'", "broadcast #2 of 12 float32 from position 0")),
        (_another_size, ("of 12 float32", "of 13 float32")),
        (_another_dtype, ("of 12 float32", "of 12 bfloat16")),
        (_another_tag, ("tagged 'blocks.0'", "tagged 'blocks.1'")),
        (_another_root, ("from position 0", "from position 2")),
    ],
)
def test_mismatch_is_named_on_every_rank(fn: Callable[[World, comm.Communicator], None], said: tuple[str, str]) -> None:
    def body(world: World) -> None:
        group = all_ranks_communicator(world)
        group.barrier()
        fn(world, group)

    met = run_on_threads(3, body)
    assert sorted(met) == [0, 1, 2]
    for error in met.values():
        assert error.facts["kind"] == "mismatch" and error.facts["sequence"] == 2
        assert all(text in error.got for text in said), error.got
        assert "rank 0, 2: " in error.got and "rank 1: " in error.got


def test_broken_for_good() -> None:
    def body(world: World) -> None:
        group = all_ranks_communicator(world)
        with pytest.raises(CollectiveError) as first:
            _another_size(world, group)
        for call in (
            group.barrier,
            lambda: group.all_reduce(torch.ones(1)),
            lambda: group.broadcast(torch.ones(1), root=0),
        ):
            with pytest.raises(CollectiveError) as again:
                call()
            assert again.value.got == first.value.got
        all_ranks_communicator(world, "another channel").barrier()

    comm.run_threads(3, body)


# --- ranks that are late ----------------------------------------------------------------------------------------------


def test_timeout_says_who_waits_where_for_whom() -> None:
    def body(world: World) -> None:
        group = all_ranks_communicator(world)
        group.all_reduce(torch.ones(5), tag="first").wait()
        if world.rank == 2:
            time.sleep(1.5)
        group.all_gather(torch.zeros(30), torch.ones(10), tag="blocks.3").wait()

    met = run_on_threads(3, body, timeout_s=0.4)
    error = next(error for error in met.values() if error.facts["kind"] == "timeout")
    assert "all_gather #2 of 10 float32 tagged 'blocks.3' within 0.4 s" in error.expected
    assert "waits for rank 2" in error.got
    assert "rank 2 has finished all_reduce #1 of 5 float32 tagged 'first' and started nothing since" in error.got
    assert "timeout_s" in error.do


def test_timeout_of_run_threads_names_the_stuck() -> None:
    release = threading.Event()
    with pytest.raises(CollectiveError, match="rank 1 still running"):
        comm.run_threads(2, lambda world: world.rank == 1 and release.wait(20), limit_s=0.3)
    release.set()


def test_exchange_times_out() -> None:
    met = run_on_threads(2, lambda world: time.sleep(1) if world.rank else world.exchange(1), timeout_s=0.3)
    assert met[0].got == "ranks [0] alone"
    met = run_on_threads(2, lambda world: world.rank or world.exchange(1))
    assert met[0].got == "ranks [0] alone: the others ended"


# --- ranks that give up -----------------------------------------------------------------------------------------------


def test_first_exception_is_raised_and_frees_the_others() -> None:
    met = {}

    def body(world: World) -> None:
        if world.rank == 1:
            raise KeyError("mine")
        try:
            all_ranks_communicator(world).barrier()
        except CollectiveError as error:
            met[world.rank] = error
            raise

    begin = time.monotonic()
    with pytest.raises(KeyError, match="mine"):
        comm.run_threads(3, body)
    assert time.monotonic() - begin < NOTICED_S
    assert all(error.facts["kind"] in ("aborted", "closed") for error in met.values()) and sorted(met) == [0, 2]


def test_abort_wakes_all() -> None:
    def body(world: World) -> None:
        group = all_ranks_communicator(world)
        if world.rank == 0:
            time.sleep(0.2)
            group.abort("no memory left")
        group.all_reduce(torch.ones(100_000)).wait()

    met = run_on_threads(3, body)
    assert sorted(met) == [0, 1, 2]
    assert all("rank 0 aborted: no memory left" in error.got for error in met.values())


def test_close_ends_what_is_under_way() -> None:
    def body(world: World) -> str:
        group = all_ranks_communicator(world)
        if world.rank == 0:
            handle = group.all_reduce(torch.ones(1_000_000))
            time.sleep(0.1)
            group.close()
            group.close()
        with pytest.raises(CollectiveError) as met:
            if world.rank == 1:
                time.sleep(0.3)
                handle = group.all_reduce(torch.ones(1_000_000))
            handle.wait()
        with pytest.raises(CollectiveError):
            group.barrier()
        return str(met.value.facts["kind"])

    assert comm.run_threads(2, body) == ["closed", "closed"]


def _communicator_by_hand(region: Any) -> comm.Communicator:
    native = shared_memory.SharedMemoryCommunicator
    return native(region, (0, 1), 0, "by hand", pids=(), timeout_s=1.0, make=lambda ranks, name: None)


def test_half_built_is_destroyed_cleanly() -> None:
    region = shared_memory.native.Region.in_threads(2, 4096)
    for _ in range(20):
        group = _communicator_by_hand(region)
        del group
    group = _communicator_by_hand(region)
    group.all_reduce(torch.ones(4))
    del group, region


# --- processes --------------------------------------------------------------------------------------------------------


def _killed_in_collectives(world: World, verb: str, in_place: bool) -> tuple[float, str, str]:
    """Kill rank 1 while all ranks are in a long run of operations."""
    group = all_ranks_communicator(world)
    n = 1 << 20
    make = group.buffer if in_place else torch.ones
    whole, shard = make(world.size * n, dtype=torch.float32), make(n, dtype=torch.float32)
    group.barrier()
    if world.rank == 1:
        threading.Timer(0.3, lambda: os.kill(os.getpid(), signal.SIGKILL)).start()
    try:
        while True:
            if verb == "barrier":
                group.barrier()
            else:
                call = group.all_gather if verb == "all_gather" else group.reduce_scatter
                call(*((whole, shard) if verb == "all_gather" else (shard, whole))).wait()
    except CollectiveError as error:
        return time.monotonic(), str(error.facts["kind"]), error.got


@pytest.mark.world
@pytest.mark.parametrize(
    ("verb", "in_place"),
    [
        ("all_gather", False),
        ("reduce_scatter", False),
        ("all_gather", True),
        ("reduce_scatter", True),
        ("barrier", False),
    ],
)
def test_killed_rank(verb: str, in_place: bool, tmp_path: Path) -> None:
    before = set(os.listdir("/dev/shm"))
    begin = time.monotonic()
    outcomes = run_comm_ranks(3, _killed_in_collectives, verb, in_place, folder=tmp_path, limit_s=30)
    assert outcomes[1].exit_code == -signal.SIGKILL and outcomes[1].value is None
    for outcome in (outcomes[0], outcomes[2]):
        assert outcome.error is None and outcome.exit_code == 0, outcome.trace
        _, kind, got = outcome.value
        assert kind == "dead" and "rank 1 is dead" in got
    assert abs(outcomes[0].value[0] - outcomes[2].value[0]) < NOTICED_S
    assert time.monotonic() - begin < 20
    assert {name for name in set(os.listdir("/dev/shm")) - before if "npuzero" in name} == set()


def _killed_while_others_wait(world: World) -> tuple[float, float, str]:
    group = all_ranks_communicator(world)
    group.barrier()
    if world.rank == 1:
        time.sleep(0.3)
        os.kill(os.getpid(), signal.SIGKILL)
    at = time.monotonic() + 0.3
    with pytest.raises(CollectiveError) as met:
        group.all_reduce(torch.ones(10)).wait()
    return at, time.monotonic(), met.value.got


@pytest.mark.world
def test_killed_rank_is_noticed_in_time(tmp_path: Path) -> None:
    outcomes = run_comm_ranks(4, _killed_while_others_wait, folder=tmp_path, limit_s=30)
    for rank in (0, 2, 3):
        assert outcomes[rank].error is None, outcomes[rank].trace
        killed_s, noticed_s, got = outcomes[rank].value
        assert "rank 1 is dead; rank 1 has finished barrier #1" in got
        assert noticed_s - killed_s < NOTICED_S


def _killed_before_meeting(world: World) -> str:
    if world.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(CollectiveError) as met:
        all_ranks_communicator(world).barrier()
    with pytest.raises(CollectiveError, match="rank 1 is dead"):
        world.exchange(1)
    return met.value.got


@pytest.mark.world
def test_rank_that_dies_before_its_first_collective(tmp_path: Path) -> None:
    outcomes = run_comm_ranks(2, _killed_before_meeting, folder=tmp_path, limit_s=30)
    assert outcomes[0].error is None, outcomes[0].trace
    assert "rank 1 is dead; rank 1 has not opened this communicator" in outcomes[0].value


def _leaves_while_busy(world: World, how: str) -> str:
    group = all_ranks_communicator(world)
    group.barrier()
    if world.rank == 1:
        if how == "raises":
            raise KeyError("mine")
        handle = group.all_reduce(torch.ones(10))  # under way when the interpreter ends
        if how == "aborts":
            world.abort("enough")
        else:
            del handle
            sys.exit(0)
    with pytest.raises(CollectiveError) as met:
        for _ in range(2):
            group.all_reduce(torch.ones(10)).wait()
    return str(met.value.facts["kind"])


@pytest.mark.world
@pytest.mark.parametrize(
    ("how", "kinds"), [("raises", ("closed", "dead")), ("exits", ("closed", "dead")), ("aborts", ("aborted",))]
)
def test_rank_that_leaves_without_closing(how: str, kinds: tuple[str, ...], tmp_path: Path) -> None:
    begin = time.monotonic()
    outcomes: list[RankOutcome] = run_comm_ranks(3, _leaves_while_busy, how, folder=tmp_path, limit_s=30)
    for rank in (0, 2):
        assert outcomes[rank].error is None, outcomes[rank].trace
        assert outcomes[rank].value in kinds
    assert all(outcome.exit_code is not None for outcome in outcomes), "a rank hung at its end"
    assert time.monotonic() - begin < 20


def _gloo_killed(world: World) -> str:
    group = all_ranks_communicator(world)
    group.barrier()
    if world.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(CollectiveError) as met:
        group.all_reduce(torch.ones(10), tag="late").wait()
    with pytest.raises(CollectiveError):
        group.barrier()
    return str(met.value)


@pytest.mark.world
def test_killed_rank_over_gloo(tmp_path: Path) -> None:
    outcomes = run_comm_ranks(2, _gloo_killed, folder=tmp_path, backend="gloo", limit_s=30)
    assert outcomes[0].error is None, outcomes[0].trace
    assert "all_reduce #2 tagged 'late' of 'all' on rank 0: expected gloo" in outcomes[0].value
