"""Every communicator does the same, bit for bit: threads, processes over shared memory, gloo, hierarchical."""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from npuzero import comm, observe
from npuzero.comm import World
from npuzero.comm.backends import shared_memory
from npuzero.comm.backends.hierarchical import HierarchicalCommunicator
from npuzero.comm.backends.process_group import AcceleratorCommunicator, make_group
from npuzero.errors import CollectiveError, OutOfSpace
from world import comm_cases
from world.comm_ranks import SLOT_BYTES, rank_results, run_comm_ranks

SIZES = (2, 3, pytest.param(4, marks=pytest.mark.slow))


@pytest.fixture
def _small_slots(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_memory, "SLOT_BYTES", SLOT_BYTES)


@pytest.mark.parametrize("size", (*SIZES, pytest.param(8, marks=pytest.mark.slow)))
def test_threads(size: int, _small_slots: None) -> None:
    comm.run_threads(size, lambda world: comm_cases.all_cases(world, few=size == 8))


@pytest.mark.world
@pytest.mark.parametrize("size", SIZES)
def test_processes(size: int, tmp_path: Path) -> None:
    rank_results(run_comm_ranks(size, comm_cases.all_cases, size == 4, folder=tmp_path))


@pytest.mark.world
@pytest.mark.parametrize("size", (2, pytest.param(4, marks=pytest.mark.slow)))
def test_gloo_sums_bit_for_bit_as_shared_memory(size: int, tmp_path: Path) -> None:
    rank_results(run_comm_ranks(size, comm_cases.all_cases, True, folder=tmp_path, backend="gloo"))


def test_full_slots() -> None:
    def large(world: World) -> None:
        group = world.communicator(range(world.size), "large")
        comm_cases.check_case_reduce_scatter(group, torch.bfloat16, 300_001)
        comm_cases.check_all_gather(group, torch.float32, 300_001)
        comm_cases.check_case_all_reduce(group, torch.float32, 1_000_003)
        comm_cases.check_all_to_all(group, torch.float32, 300_001)
        comm_cases.check_send(group, torch.float32, 300_001)

    comm.run_threads(3, large)


@pytest.mark.parametrize("numel", [5, 1_000_000])
def test_a_rank_that_brings_nothing_where_others_bring_something_is_told(numel: int) -> None:
    def body(world: World) -> None:
        group = world.communicator((0, 1), "uneven")
        with pytest.raises(CollectiveError, match=f"of 0 float32.*of {numel} float32"):
            group.all_reduce(torch.zeros(world.rank * numel)).wait()

    comm.run_threads(2, body)


@pytest.mark.skipif(not hasattr(os, "SCHED_IDLE"), reason="a policy of Linux")
def test_what_a_rank_says_is_there_is_there() -> None:
    """Both ranks are on one core, and rank 0 yields as soon as it wakes its peer: it has only posted."""
    kib_64 = 2**14
    numels = (1, kib_64 - 1, kib_64, kib_64 + 1, kib_64, 2 * kib_64)

    def body(world: World) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        group = world.communicator((0, 1), "uneven")
        brought = [[torch.full((numel,), float(3 * i + rank)) for rank in (0, 1)] for i, numel in enumerate(numels)]
        sums = [both[world.rank].clone() for both in brought]

        def reduce() -> None:
            os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})  # of this thread
            if world.rank == 0:
                os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))  # any other thread goes first
            for buffer in sums:
                group.all_reduce(buffer).wait()

        thread = threading.Thread(target=reduce)
        thread.start()
        thread.join()
        return sums, [both[0] + both[1] for both in brought]

    for sums, expected in comm.run_threads(2, body):
        for got, want in zip(sums, expected, strict=True):
            comm_cases.assert_bits(got, want, f"all_reduce of {want.numel()}")


@pytest.mark.parametrize("size", (4, 8))
def test_hierarchical_equals_flat(size: int, _small_slots: None) -> None:
    comm.run_threads(size, _check_hierarchical)


@pytest.mark.world
def test_hierarchical_over_gloo_equals_shared_memory(tmp_path: Path) -> None:
    rank_results(run_comm_ranks(4, _check_hierarchical, folder=tmp_path, backend="gloo"))


def _check_hierarchical(world: World) -> None:
    """Composed of one communicator per axis, a permuted group moves the same bytes; sums of integers are exact."""
    mesh = comm.Mesh(world, 2)
    axes = ("local", "node")
    group = HierarchicalCommunicator(
        mesh.communicator(("local",), "outer"),
        mesh.communicator(("node",), "inner"),
        world.communicator(range(world.size), "flat"),
        mesh.ranks(axes),
        "composed",
    )
    assert group.rank == mesh.index(axes)
    for n in (1, 5, 4000):
        for dtype in (torch.float32, torch.bfloat16, torch.int64):
            comm_cases.check_all_gather(group, dtype, n)
            comm_cases.check_all_to_all(group, dtype, n)
            comm_cases.check_broadcast(group, dtype, n)
            comm_cases.check_send(group, dtype, n)
            comm_cases.check_case_all_reduce(group, dtype, n)
        for wire in comm_cases.WIRES:
            whole = torch.arange(world.size * n, dtype=torch.float32).remainder(5).add(world.rank).to(wire)
            shard = torch.ones(n)
            group.reduce_scatter(shard, whole, accumulate=True).wait()
            part = torch.arange(world.size * n, dtype=torch.float32).remainder(5)[group.rank * n :][:n]
            expected = 1 + world.size * part + world.size * (world.size - 1) / 2
            comm_cases.assert_bits(shard, expected, f"hierarchical reduce_scatter {wire} {n}")
    group.barrier()


@pytest.mark.world
def test_sends_as_accelerators_make_them(tmp_path: Path) -> None:
    rank_results(run_comm_ranks(3, _as_on_accelerators, folder=tmp_path, backend="gloo"))


def _as_on_accelerators(world: World) -> None:
    """Use torch's isend and irecv only, with gloo in place of nccl or hccl."""
    ranks = range(world.size)
    backend = make_group(ranks, "gloo", "device", timeout_s=20.0)
    group = AcceleratorCommunicator(backend, ranks, world.rank, "stages", torch.device("cpu"), "nccl")
    for n in (1, 5, 4000):
        comm_cases.check_send(group, torch.float32, n)
        comm_cases.check_send(group, torch.bool, n)
    if world.rank < 2:
        call = group.recv if world.rank else group.send
        call(torch.ones(3), 1 - world.rank, "x").wait()
    if world.rank == 1:
        group.abort("enough")
        with pytest.raises(CollectiveError, match="enough"):
            group.send(torch.ones(3), 0)


def test_operations_are_observed() -> None:
    def body(world: World) -> None:
        group = world.communicator((0, 1), "gather")
        first = group.all_gather(torch.zeros(6), torch.ones(3), tag="gather blocks.0")
        group.all_reduce(torch.ones(3)).wait()
        first.wait()
        first.wait()

    with observe.recording(observe.Events()) as seen:
        comm.run_threads(2, body)
    spans = {(event.rank, event.name): event for event in seen.events if isinstance(event, observe.Span)}
    assert len(seen.events) == len(spans) == 4
    for rank in (0, 1):
        gather, reduce = spans[rank, "gather blocks.0"], spans[rank, "all_reduce"]
        assert {gather.category, reduce.category} == {"comm gather"}
        assert gather.facts == {"verb": "all_gather", "sequence": 1}
        assert gather.begin_s <= gather.end_s <= reduce.begin_s <= reduce.end_s <= time.perf_counter()


def test_both_ends_of_a_send_are_observed() -> None:
    def body(world: World) -> None:
        group = world.communicator((0, 1), "stages")
        (group.recv if world.rank else group.send)(torch.ones(6), 1 - world.rank, "ahead 0").wait()

    with observe.recording(observe.Events()) as seen:
        comm.run_threads(2, body)
    spans = {event.rank: event for event in seen.events if isinstance(event, observe.Span)}
    for rank, verb in enumerate(("send", "recv")):
        assert (spans[rank].category, spans[rank].name) == ("comm stages", "ahead 0")
        assert spans[rank].facts == {"verb": verb, "sequence": 1}


@pytest.mark.world
def test_shared_buffers_give_their_memory_back(tmp_path: Path) -> None:
    rank_results(run_comm_ranks(2, _buffers_come_and_go, folder=tmp_path))


def _buffers_come_and_go(world: World) -> None:
    group = world.communicator((0, 1), "case")
    n = 1 << 20
    for _ in range(3):
        buffer, other = group.buffer(n, torch.float32), group.buffer(5, torch.bfloat16)
        assert not buffer.any() and not other.any()
        buffer.fill_(world.rank + 1)
        group.all_reduce(buffer).wait()
        assert (buffer == 3).all() and _arena_bytes() >= buffer.nbytes
        view = buffer[7:9]
        del buffer
        assert view.sum() == 6 and _arena_bytes() >= 4 * n  # the last view keeps it
        _in_forked_child(lambda view=view: (view.set_(), group.buffer(3, torch.int64)))
        del view, other
        assert _arena_bytes() == 0
        group.barrier()
    assert group.buffer(0, torch.float32).numel() == 0
    with pytest.raises(OutOfSpace, match="room for"):
        group.buffer(1 << 50, torch.uint8)


def _arena_bytes() -> int:
    """Return the size of the file behind this process's buffers."""
    fds = [fd for fd in Path("/proc/self/fd").iterdir() if "npuzero-arena" in os.path.realpath(fd)]
    (fd,) = fds
    return 512 * os.stat(fd).st_blocks


def _in_forked_child(action: Callable[[], object]) -> None:
    """Run `action` in a fork of this process; memory freed at its end must not be taken from the parent."""
    child = os.fork()
    if child == 0:
        action()
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0


@pytest.mark.world
def test_named_memory_leaves_no_name(tmp_path: Path) -> None:
    before = _shared_memory_names()
    seen = rank_results(run_comm_ranks(3, without_leave, folder=tmp_path))
    assert seen == [True] * 3
    assert _shared_memory_names() <= before


def without_leave(world: World) -> bool:
    world._named = True  # type: ignore[attr-defined]
    comm_cases.many_case_handles(world)
    everyone = tuple(range(world.size))
    return world.communicator(everyone, "case") is world.communicator(everyone, "case") and not _shared_memory_names()


def _shared_memory_names() -> set[str]:
    return {path.name for path in Path("/dev/shm").glob("npuzero-*")}


@pytest.mark.world
def test_torchrun(tmp_path: Path) -> None:
    """The launcher's variables are enough; the default for CPU ranks of one host is shared memory."""
    _launch_two_ranks(
        tmp_path / "rank.py",
        "import torch\n"
        "from npuzero import comm\n"
        "world = comm.process_world('cpu')\n"
        "assert comm.current_world() is world and world.local == (0, 1)\n"
        "group = world.communicator((0, 1), 'all')\n"
        "buffer = torch.ones(5)\n"
        "group.all_reduce(buffer).wait()\n"
        "assert type(group).__name__ == 'SharedMemoryCommunicator' and buffer.sum() == 10\n",
    )


@pytest.mark.world
def test_ranks_that_nobody_joined_do_not_train_apart(tmp_path: Path) -> None:
    """zero() without init() reads the number of ranks from the launcher's variables."""
    _launch_two_ranks(
        tmp_path / "rank.py",
        "import torch, npuzero\n"
        "model = npuzero.zero(torch.nn.Linear(4, 4), stage=3)\n"
        "optimizer = npuzero.AdamW(model.parameters())\n"
        "model(torch.ones(1, 4)).sum().backward()\n"
        "optimizer.step()\n"
        "assert npuzero.report(model).world == 2\n",
    )


def _launch_two_ranks(script: Path, program: str) -> None:
    script.write_text(program)
    launcher = [sys.executable, "-W", "error", "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = subprocess.run([*launcher, str(script)], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr


def test_beside_compute_a_rank_that_has_not_begun_is_slept_for():
    """Polling for it, as an idle thread does, takes 50 us of a core each time."""

    def body(world: World) -> int:
        group = world.communicator((0, 1), "late")
        buffer, looked = torch.ones(64), []
        for _ in range(10):
            group.barrier()
            before = group.native.looks
            if world.rank == 0:
                handle = group.all_reduce(buffer)  # for a while only its progress thread handles it
                time.sleep(0.02)
            else:
                time.sleep(0.01)
                handle = group.all_reduce(buffer)
            time.sleep(0.02)  # no thread waits for it until it is done
            looked.append(group.native.looks - before)
            handle.wait()
        return statistics.median(looked)

    assert comm.run_threads(2, body)[0] == 0
