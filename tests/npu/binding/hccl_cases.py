"""What ranks on the fake device do with npuzero's communicators, through the real ProcessGroupHCCL."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from npu.fake import compute
from npuzero.comm import HOST_CHANNEL, Communicator, Mesh, World
from npuzero.comm.backends.hierarchical import HierarchicalCommunicator
from npuzero.errors import CollectiveError
from world.comm_cases import MOVED, SUMMED, WIRES, assert_bits, rank_values, sum_in_order

#: From one element to several rounds of the fake's slots.
NUMELS = (1, 7, 100_003)


def run_hccl_cases(world: World) -> dict[str, Any]:
    """One job for all cases of a world: starting ranks takes longer than what they do."""
    facts = made_lazily(world)
    compute.compute_on_host()
    check_every_verb(world)
    check_stream_order(world)
    return facts


def check_stream_order(world: World) -> None:
    """What comes out wrong where somebody does not wait for a stream."""
    compute.compute_on_host()
    many_hccl_handles(world)
    two_hccl_channels(world)
    check_mesh_axes(world)
    group = world.communicator(range(world.size), "gather")
    check_hccl_all_reduce(group, torch.float64, 100)
    check_hccl_reduce_scatter(group, torch.bfloat16, 1000)


def made_lazily(world: World) -> dict[str, Any]:
    """The backend is chosen by the device; hccl has no group before somebody needs it, and none larger than needed."""
    before = _logged_lines("comm")
    everyone = range(world.size)
    host = world.communicator(everyone, HOST_CHANNEL)
    votes = torch.ones(3)
    host.all_reduce(votes).wait()
    assert votes.tolist() == [world.size] * 3
    after_host = _logged_lines("comm")
    groups = [world.communicator(everyone, name) for name in ("gather", "control", "restore", "gather")]
    assert groups[0] is groups[3] is not groups[2]
    return {
        "backend": dist.get_backend(),
        "device": str(world.device),
        "before": before,
        "after_host": after_host,
        "sizes": sorted(line.split("buffer_mb=")[1] for line in _logged_lines("comm")),
    }


def _logged_lines(word: str) -> list[str]:
    """This process's lines in the fake's log that begin so."""
    path = Path(os.environ["FAKE_HCCL_LOG"])
    lines = path.read_text().splitlines() if path.exists() else []
    return [line for line in lines if line.startswith(f"{os.getpid()} {word}")]


def check_every_verb(world: World) -> None:
    """Every verb, in every dtype, where hccl has it and where it has not."""
    group = world.communicator(range(world.size), "gather")
    for n in NUMELS:
        for dtype in MOVED:
            check_moves(group, dtype, n)
        for dtype in SUMMED:
            check_hccl_all_reduce(group, dtype, n)
        for dtype in WIRES:
            check_hccl_reduce_scatter(group, dtype, n)
    group.barrier()


def to_group_device(group: Communicator, tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to(group.device)


def check_moves(group: Communicator, dtype: torch.dtype, n: int) -> None:
    mine = [rank_values(rank, group.size * n, dtype) for rank in group.ranks]
    own = slice(group.rank * n, (group.rank + 1) * n)
    whole = torch.empty(group.size * n, dtype=dtype, device=group.device)
    group.all_gather(whole, to_group_device(group, mine[group.rank][:n])).wait()
    assert_bits(whole.cpu(), torch.cat([tensor[:n] for tensor in mine]), f"all_gather {dtype} {n}")
    group.all_to_all(whole, to_group_device(group, mine[group.rank])).wait()
    assert_bits(whole.cpu(), torch.cat([tensor[own] for tensor in mine]), f"all_to_all {dtype} {n}")
    buffer = to_group_device(group, mine[group.rank][:n])
    group.broadcast(buffer, root=group.size - 1).wait()
    assert_bits(buffer.cpu(), mine[-1][:n], f"broadcast {dtype} {n}")


def check_hccl_all_reduce(group: Communicator, dtype: torch.dtype, n: int) -> None:
    buffer = to_group_device(group, rank_values(group.ranks[group.rank], n, dtype))
    group.all_reduce(buffer).wait()
    expected = sum_in_order([rank_values(rank, n, dtype) for rank in group.ranks]).to(dtype)
    assert_bits(buffer.cpu(), expected, f"all_reduce {dtype} {n}")


def check_hccl_reduce_scatter(group: Communicator, wire: torch.dtype, n: int) -> None:
    """The sum is made in the wire's dtype, and added to what is there in float32."""
    own = slice(group.rank * n, (group.rank + 1) * n)
    total = sum_in_order([rank_values(rank, group.size * n, wire)[own] for rank in group.ranks]).to(wire)
    for result in {wire, torch.float32}:
        for accumulate in (False, True):
            start = rank_values(77, n, result)
            whole, shard = (
                to_group_device(group, rank_values(group.ranks[group.rank], group.size * n, wire)),
                to_group_device(group, start),
            )
            group.reduce_scatter(shard, whole, accumulate=accumulate).wait()
            expected = (start.float() + total.float()).to(result) if accumulate else total.to(result)
            assert_bits(shard.cpu(), expected, f"reduce_scatter {wire} to {result}, accumulate={accumulate}, {n}")


def many_hccl_handles(world: World) -> None:
    """Results are right on the current stream once waited for, in whatever order."""
    group = world.communicator(range(world.size), "gather")
    n, count = 3000, 20
    wholes = [torch.empty(world.size * n, device=world.device) for _ in range(count)]
    shards = [to_group_device(group, torch.full((n,), 10.0 * k + world.rank)) for k in range(count)]
    handles = [group.all_gather(whole, shard) for whole, shard in zip(wholes, shards, strict=True)]
    for k in reversed(range(count)):
        handles[k].wait()
        copy = torch.empty_like(wholes[k])
        copy.copy_(wholes[k])  # on the current stream, which the wait holds
        expected = torch.cat([torch.full((n,), 10.0 * k + rank) for rank in range(world.size)])
        assert torch.equal(copy.cpu(), expected), f"gather {k}"


def two_hccl_channels(world: World) -> None:
    """Ranks use two communicators in different order; neither waits for the other."""
    names = sorted(("gather", "reduce"), reverse=world.rank % 2 == 1)
    for name in ("gather", "reduce"):  # made in one order: making meets
        world.communicator(range(world.size), name)
    buffers = {name: to_group_device(world.communicator(range(world.size), name), torch.ones(20_000)) for name in names}
    handles = [world.communicator(range(world.size), name).all_reduce(buffers[name]) for name in names * 3]
    for handle in handles:
        handle.wait()
    for buffer in buffers.values():
        assert buffer.cpu().eq(world.size**3).all()


def check_mesh_axes(world: World) -> None:
    """Every group of a mesh; the order that a process group cannot have is composed of one collective per axis."""
    mesh = Mesh(world, 2 if world.size % 2 == 0 else 1)
    for group in (mesh.communicator(part, "gather") for part in (("local",), ("node",), ("local", "node"))):
        composed = list(group.ranks) != sorted(group.ranks)
        assert isinstance(group, HierarchicalCommunicator) is composed
        whole = torch.empty(group.size * 5, device=world.device)
        group.all_gather(whole, to_group_device(group, rank_values(world.rank, 5, torch.float32))).wait()
        assert_bits(whole.cpu(), torch.cat([rank_values(rank, 5, torch.float32) for rank in group.ranks]), str(group))


# --- faults --------------------------------------------------------------------------------------------------------


def a_rank_that_does_not_connect(world: World) -> str | None:
    """The hint to HCCL_CONNECT_TIMEOUT comes with the first group, not in the middle of a step."""
    if world.rank == 1:
        world._group(range(world.size), "hccl", "gather")  # it comes to the meeting, and then not to hccl's
        time.sleep(4)
        return None
    return _caught_error(lambda: world.communicator(range(world.size), "gather"))


def _caught_error(call: Callable[[], Any]) -> str | None:
    try:
        call()
    except (CollectiveError, RuntimeError) as error:
        return str(error)
    return None
