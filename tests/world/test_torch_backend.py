"""torch.distributed on "shm": every collective compared with gloo, and libraries on top of them, unchanged."""

from __future__ import annotations

import copy
import os
import signal
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn

import npuzero
from npuzero import CollectiveError, ContractError
from npuzero.comm import World
from world.comm_cases import assert_bits, rank_values, sum_in_order
from world.comm_ranks import rank_results, run_comm_ranks

pytestmark = pytest.mark.world

DTYPES = (
    torch.float32,
    torch.bfloat16,
    torch.float16,
    torch.float64,
    torch.int64,
    torch.int32,
    torch.int8,
    torch.uint8,
)
MOVED = (*DTYPES, torch.bool)
OPS = ("SUM", "PRODUCT", "MAX", "MIN")


@contextmanager
def shm_backend(world: World, folder: Path, name: str = "meeting", timeout_s: float = 30.0) -> Iterator[None]:
    """torch.distributed on shm in place of the gloo that ranks start with."""
    if dist.is_initialized():
        dist.destroy_process_group()
    dist.init_process_group(
        "shm",
        init_method=f"file://{folder / name}",
        rank=world.rank,
        world_size=world.size,
        timeout=timedelta(seconds=timeout_s),
    )
    yield
    dist.destroy_process_group()


def draw_exact_values(rank: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Small integers, whose sums and products are exact in every dtype and order."""
    generator = torch.Generator().manual_seed(rank)
    return torch.randint(0, 2 if dtype == torch.bool else 4, shape, generator=generator).to(dtype)


# --- collectives ------------------------------------------------------------------------------------------------------

Call = Callable[[Any, int, int, torch.dtype], list[torch.Tensor]]


def _make_all_reduce(op: str) -> Call:
    def call(group: Any, rank: int, size: int, dtype: torch.dtype) -> list[torch.Tensor]:
        tensor = draw_exact_values(rank, (3, 5), dtype).t()  # not contiguous
        dist.all_reduce(tensor, getattr(dist.ReduceOp, op), group=group)
        return [tensor]

    return call


def _run_reduce(group: Any, rank: int, size: int, dtype: torch.dtype) -> list[torch.Tensor]:
    tensor = draw_exact_values(rank, (7,), dtype)
    dist.reduce(tensor, 1, dist.ReduceOp.SUM, group=group)
    return [tensor] if rank == 1 else []


def _run_broadcast(group: Any, rank: int, size: int, dtype: torch.dtype) -> list[torch.Tensor]:
    tensors = [
        draw_exact_values(rank, (4, 6), dtype),
        draw_exact_values(rank, (), dtype),
        draw_exact_values(rank, (0,), dtype),
    ]
    for tensor in tensors:
        dist.broadcast(tensor, 1, group=group)
    return tensors


def _run_all_gather(group: Any, rank: int, size: int, dtype: torch.dtype) -> list[torch.Tensor]:
    outputs = [torch.zeros(2, 3, dtype=dtype) for _ in range(size)]
    dist.all_gather(outputs, draw_exact_values(rank, (2, 3), dtype), group=group)
    return outputs


def _all_gather_into(group: Any, rank: int, size: int, dtype: torch.dtype) -> list[torch.Tensor]:
    whole = torch.zeros(2 * size, 3, dtype=dtype)
    _single_tensor_verb("all_gather_single", "all_gather_into_tensor")(
        whole, draw_exact_values(rank, (2, 3), dtype), group=group
    )
    return [whole]


def _run_gather(group: Any, rank: int, size: int, dtype: torch.dtype) -> list[torch.Tensor]:
    outputs = [torch.zeros(4, dtype=dtype) for _ in range(size)] if rank == 1 else None
    dist.gather(draw_exact_values(rank, (4,), dtype), outputs, dst=1, group=group)
    return outputs or []


def _run_scatter(group: Any, rank: int, size: int, dtype: torch.dtype) -> list[torch.Tensor]:
    output = torch.zeros(2, 2, dtype=dtype)
    inputs = [draw_exact_values(10 + k, (2, 2), dtype) for k in range(size)] if rank == 1 else None
    dist.scatter(output, inputs, src=1, group=group)
    return [output]


def _run_reduce_scatter(group: Any, rank: int, size: int, dtype: torch.dtype) -> list[torch.Tensor]:
    listed, single = torch.zeros(3, dtype=dtype), torch.zeros(3, dtype=dtype)
    dist.reduce_scatter(listed, [draw_exact_values(rank + 10 * k, (3,), dtype) for k in range(size)], group=group)
    _single_tensor_verb("reduce_scatter_single", "reduce_scatter_tensor")(
        single, draw_exact_values(rank, (3 * size,), dtype), group=group
    )
    return [listed, single]


def _all_to_all_even(group: Any, rank: int, size: int, dtype: torch.dtype) -> list[torch.Tensor]:
    output = torch.zeros(2 * size, 2, dtype=dtype)
    dist.all_to_all_single(output, draw_exact_values(rank, (2 * size, 2), dtype), group=group)
    return [output]


def _all_to_all_uneven(group: Any, rank: int, size: int, dtype: torch.dtype) -> list[torch.Tensor]:
    sent = [(rank + 2 * peer) % 3 for peer in range(size)]
    kept = [(peer + 2 * rank) % 3 for peer in range(size)]
    output = torch.zeros(sum(kept), 2, dtype=dtype)
    dist.all_to_all_single(output, draw_exact_values(rank, (sum(sent), 2), dtype), kept, sent, group=group)
    return [output]


def _single_tensor_verb(name: str, before: str) -> Any:
    return getattr(dist, name, None) or getattr(dist, before)


def _against_gloo(world: World, folder: Path) -> None:
    with shm_backend(world, folder):
        assert dist.get_backend() == "shm"
        gloo = dist.new_group(backend="gloo")
        cases: list[tuple[Call, tuple[torch.dtype, ...]]] = [(_make_all_reduce(op), DTYPES) for op in OPS]
        cases += [(_make_all_reduce(op), (torch.int32, torch.uint8)) for op in ("BAND", "BOR", "BXOR")]
        cases += [(_make_all_reduce("AVG"), (torch.float32,)), (_run_reduce, DTYPES)]
        cases += [
            (call, DTYPES) for call in (_run_all_gather, _all_gather_into, _run_gather, _run_scatter, _run_broadcast)
        ]
        cases += [(_run_reduce_scatter, (torch.float32, torch.int64)), (_all_to_all_even, DTYPES)]
        cases += [(_all_to_all_uneven, (torch.float32, torch.int64))]
        for call, dtypes in cases:
            for dtype in dtypes:
                ours, theirs = (call(group, world.rank, world.size, dtype) for group in (None, gloo))
                assert len(ours) == len(theirs)
                for mine, other in zip(ours, theirs, strict=True):
                    assert torch.equal(mine, other), f"{call.__qualname__} {dtype}: {mine} {other}"


@pytest.mark.parametrize("size", (2, 3))
def test_collectives_equal_gloo(size: int, tmp_path: Path) -> None:
    rank_results(run_comm_ranks(size, _against_gloo, tmp_path, folder=tmp_path))


def _rest_of_the_verbs(world: World, folder: Path) -> None:
    rank, size = world.rank, world.size
    with shm_backend(world, folder):
        for dtype in (torch.float32, torch.bfloat16, torch.float16):  # sums in the order of the ranks, rounded once
            buffer = rank_values(rank, 1000, dtype)
            dist.all_reduce(buffer)
            assert_bits(buffer, sum_in_order([rank_values(peer, 1000, dtype) for peer in range(size)]).to(dtype), "sum")
        lazy = torch.complex(torch.zeros(1), torch.ones(1)).conj().imag  # -1, which its memory does not hold
        dist.all_reduce(lazy)
        assert lazy.item() == -size
        uneven = [torch.zeros(1 + peer) for peer in range(size)]
        dist.all_gather(uneven, torch.full((1 + rank,), float(rank)))
        assert [tensor.tolist() for tensor in uneven] == [[float(peer)] * (1 + peer) for peer in range(size)]
        output = torch.zeros(1 + rank)
        dist.reduce_scatter(output, [torch.full((1 + peer,), float(peer)) for peer in range(size)])
        assert output.tolist() == [float(size * rank)] * (1 + rank)
        received = [torch.zeros(1 + peer) for peer in range(size)]
        dist.all_to_all(received, [torch.full((1 + rank,), float(peer)) for peer in range(size)])
        assert [tensor.tolist() for tensor in received] == [[float(rank)] * (1 + peer) for peer in range(size)]

        right, left = (rank + 1) % size, (rank - 1) % size
        got = torch.zeros(300, 300)
        for work in dist.batch_isend_irecv(
            [dist.P2POp(dist.isend, torch.full((300, 300), float(rank)), right), dist.P2POp(dist.irecv, got, left)]
        ):
            work.wait()
        assert (got == left).all()
        across = torch.zeros(4, 3)[:, ::2]  # not contiguous: received beside it
        works = [dist.isend(torch.full((4, 2), float(tag)).T, right, tag=tag) for tag in (7, 8)]
        for tag in (8, 7):  # another tag does not wait for this
            dist.recv(across, left, tag=tag)
            assert (across == tag).all()
        for work in works:
            work.wait()

        objects: list[Any] = [None] * size
        dist.all_gather_object(objects, {"rank": rank, "text": "x" * rank})
        assert objects == [{"rank": peer, "text": "x" * peer} for peer in range(size)]
        told = [("a", 1), None] if rank == 0 else [None, None]
        dist.broadcast_object_list(told)
        assert told == [("a", 1), None]
        given: list[Any] = [None]
        dist.scatter_object_list(given, [f"for {peer}" for peer in range(size)] if rank == 0 else None)
        assert given == [f"for {rank}"]
        kept: list[Any] | None = [None] * size if rank == 1 else None
        dist.gather_object(rank * "y", kept, dst=1)
        assert kept is None or kept == [peer * "y" for peer in range(size)]

        work = dist.barrier(async_op=True)
        work.wait(timedelta(seconds=20))
        assert work.is_completed() and work.is_success() and work.exception() is None
        future = dist.all_reduce(torch.ones(3), async_op=True).get_future()
        assert future.wait()[0].tolist() == [size] * 3
        late = dist.all_reduce(torch.ones(3, dtype=torch.int16), dist.ReduceOp.MAX, async_op=True)
        while not late.is_completed():
            time.sleep(0.001)
        assert late.result()[0].tolist() == [1] * 3
        functional = torch.distributed._functional_collectives.all_reduce(torch.ones(2), "sum", dist.group.WORLD)
        assert functional.tolist() == [size] * 2


def test_everything_else_a_group_does(tmp_path: Path) -> None:
    rank_results(run_comm_ranks(3, _rest_of_the_verbs, tmp_path, folder=tmp_path))


def _subgroups(world: World, folder: Path) -> None:
    rank = world.rank
    with shm_backend(world, folder):
        pair = dist.new_group([1, 3])
        alone = dist.new_group([rank], use_local_synchronization=True)
        mesh = dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
        for group, members in ((pair, [1, 3]), (alone, [rank]), (mesh["a"].get_group(), [rank % 2, rank % 2 + 2])):
            if rank in members:
                tensor = torch.tensor([float(rank)])
                dist.all_reduce(tensor, group=group)
                assert tensor.item() == sum(members)
                dist.barrier(group)
        # npuzero's own communicators stand beside it
        assert npuzero.comm.ProcessWorld(
            dist.PrefixStore("own", dist.distributed_c10d._get_default_store()), rank, 4, torch.device("cpu")
        ).exchange(rank) == [0, 1, 2, 3]


def test_subgroups(tmp_path: Path) -> None:
    rank_results(run_comm_ranks(4, _subgroups, tmp_path, folder=tmp_path))


def _destroys_groups(world: World, folder: Path) -> None:
    store = dist.FileStore(str(folder / "store"), world.size)
    dist.destroy_process_group()
    for _ in range(2):
        dist.init_process_group("shm", store=store, rank=world.rank, world_size=world.size)
        halves = [dist.new_group([0, 1]), dist.new_group([1, 2])]
        mine = [group for group in halves if group is not dist.GroupMember.NON_GROUP_MEMBER]
        for group in mine:
            dist.all_reduce(torch.ones(2), group=group)
            dist.destroy_process_group(group)
        again, tensor = dist.new_group([0, 2]), torch.ones(2)
        if world.rank != 1:
            dist.all_reduce(tensor, group=again)
        dist.all_reduce(tensor)
        assert tensor[0] == 2 + 1 + 2
        for group in mine:
            with pytest.raises(ValueError, match="Invalid process group"):
                dist.destroy_process_group(group)
        dist.destroy_process_group()
        assert not dist.is_initialized()


def test_groups_can_be_destroyed_one_by_one_and_made_again(tmp_path: Path) -> None:
    rank_results(run_comm_ranks(3, _destroys_groups, tmp_path, folder=tmp_path))


def _again_and_again(world: World, folder: Path) -> int:
    for k in range(5):
        with shm_backend(world, folder, f"meeting-{k}"):
            tensor = torch.ones(100_000)
            dist.all_reduce(tensor)
            assert tensor[-1] == world.size
    return len(os.listdir("/proc/self/fd"))


def test_begins_and_ends_again_and_leaves_nothing(tmp_path: Path) -> None:
    before = set(os.listdir("/dev/shm"))
    assert max(rank_results(run_comm_ranks(2, _again_and_again, tmp_path, folder=tmp_path))) < 60
    assert {name for name in set(os.listdir("/dev/shm")) - before if "npuzero" in name} == set()


# --- what is built on it ----------------------------------------------------------------------------------------------


def _build_backend_model() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(24, 48), nn.ReLU(), nn.Linear(48, 40), nn.ReLU(), nn.Linear(40, 8))


def _backend_batch(rank: int, step: int) -> torch.Tensor:
    return torch.randn(6, 24, generator=torch.Generator().manual_seed(100 * step + rank))


def _ordered_gradients(kind: str, size: int) -> list[torch.Tensor]:
    """What the first step must give. DDP scales each rank's gradient, and sums in the ranks' order; FSDP2 asks for an
    average: the sum in the ranks' order (of bf16 in f32, rounded once), divided."""
    per_rank = []
    for rank in range(size):
        model, batch = _build_backend_model(), _backend_batch(rank, 0)
        if kind == "fsdp bf16":
            model, batch = model.bfloat16(), batch.bfloat16()
        model(batch).float().square().mean().backward()
        per_rank.append([parameter.grad for parameter in model.parameters()])
    if kind == "ddp":
        per_rank = [[gradient * (1 / size) for gradient in gradients] for gradients in per_rank]
    sums = [sum_in_order(list(gradients)).to(gradients[0].dtype) for gradients in zip(*per_rank, strict=True)]
    return sums if kind == "ddp" else [total.div(size).float() for total in sums]


def _train_wrapped(kind: str, group: Any, mesh: Any, rank: int) -> tuple[list[float], list[torch.Tensor]]:
    """Losses of some steps, and the first step's gradients."""
    model, whole = _build_backend_model(), lambda tensor: tensor
    if kind == "ddp":
        trained: Any = nn.parallel.DistributedDataParallel(model, process_group=group, bucket_cap_mb=0.01)
    else:
        from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

        low = torch.bfloat16 if kind == "fsdp bf16" else None
        policy = MixedPrecisionPolicy(param_dtype=low, reduce_dtype=low)
        for layer in (*(layer for layer in model if isinstance(layer, nn.Linear)), model):
            fully_shard(layer, mesh=mesh, mp_policy=policy, reshard_after_forward=kind != "fsdp keep")
        trained = model
        whole = lambda tensor: tensor.full_tensor()  # noqa: E731
    optimizer = torch.optim.AdamW(trained.parameters(), lr=1e-2, foreach=False)
    losses, first = [], []
    for step in range(4):
        loss = trained(_backend_batch(rank, step)).float().square().mean()
        loss.backward()
        first = first or [whole(parameter.grad).clone() for parameter in model.parameters()]
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, first


def _check_parity(world: World, folder: Path, kind: str) -> None:
    with shm_backend(world, folder):
        group, mesh = None, dist.init_device_mesh("cpu", (world.size,))
        losses, gradients = _train_wrapped(kind, group, mesh, world.rank)
        for gradient, expected in zip(gradients, _ordered_gradients(kind, world.size), strict=True):
            assert_bits(gradient.view(-1), expected.view(-1), f"gradient of {kind}")
        gloo = dist.new_group(backend="gloo")
        theirs, _ = _train_wrapped(kind, gloo, dist.DeviceMesh.from_group(gloo, "cpu"), world.rank)
        if world.size == 2:  # a + b is b + a
            assert losses == theirs
        assert losses == pytest.approx(theirs, rel=2**-8 if "bf16" in kind else 1e-5)  # gloo sums in bf16


@pytest.mark.parametrize("size", (2, 3))
@pytest.mark.parametrize("kind", ("ddp", "fsdp keep", "fsdp reshard", "fsdp bf16"))
def test_parity(kind: str, size: int, tmp_path: Path) -> None:
    rank_results(run_comm_ranks(size, _check_parity, tmp_path, kind, folder=tmp_path))


def _optimizer_and_checkpoint(world: World, folder: Path) -> None:
    with shm_backend(world, folder), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's, about itself
        from torch.distributed.optim import ZeroRedundancyOptimizer

        model = _build_backend_model()
        plain = copy.deepcopy(model)
        sharded = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=1e-2)
        whole = torch.optim.AdamW(plain.parameters(), lr=1e-2)
        for step in range(3):
            for trained, optimizer in ((model, sharded), (plain, whole)):
                trained(_backend_batch(0, step)).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
        assert all(torch.equal(a, b) for a, b in zip(model.parameters(), plain.parameters(), strict=True))
        sharded.consolidate_state_dict(0)

        import torch.distributed.checkpoint as dcp
        from torch.distributed.fsdp import fully_shard

        saved = fully_shard(copy.deepcopy(plain))
        dcp.save({"model": saved.state_dict()}, checkpoint_id=folder / "checkpoint")
        loaded = fully_shard(_build_backend_model())
        state = {"model": loaded.state_dict()}
        dcp.load(state, checkpoint_id=folder / "checkpoint")
        loaded.load_state_dict(state["model"])
        for a, b in zip(loaded.parameters(), plain.parameters(), strict=True):
            assert torch.equal(a.full_tensor(), b)


def test_zero_redundancy_optimizer_and_checkpoints(tmp_path: Path) -> None:
    rank_results(run_comm_ranks(2, _optimizer_and_checkpoint, tmp_path, folder=tmp_path))


# --- faults -----------------------------------------------------------------------------------------------------------


def _check_refusals(world: World, folder: Path) -> None:
    with shm_backend(world, folder):
        refused: list[tuple[str, Callable[[], object]]] = [
            ("a dense tensor", lambda: dist.all_reduce(torch.eye(3).to_sparse())),
            ("a source rank", lambda: dist.recv(torch.zeros(1))),
            ("floats", lambda: dist.all_reduce(torch.ones(2, dtype=torch.int32), dist.ReduceOp.AVG)),
            ("MAX", lambda: dist.all_reduce(torch.ones(2), dist._make_nccl_premul_sum(2.0))),  # type: ignore[attr-defined]
            ("MAX", lambda: dist.all_reduce(torch.ones(2, dtype=torch.int16), dist.ReduceOp.AVG)),
        ]
        for expected, call in refused:
            with pytest.raises(ContractError, match=expected):
                call()
        tensor = torch.ones(3)
        dist.all_reduce(tensor)  # nothing was sent
        assert tensor.sum() == 3 * world.size


def test_what_it_does_not_do_is_said(tmp_path: Path) -> None:
    rank_results(run_comm_ranks(2, _check_refusals, tmp_path, folder=tmp_path))


def _check_rank_death(world: World, folder: Path) -> tuple[float, list[str]]:
    with shm_backend(world, folder):
        dist.barrier()
        if world.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        begin, told = time.monotonic(), []
        with pytest.raises(CollectiveError) as met:
            dist.all_reduce(torch.ones(100_000))
        told.append(str(met.value))
        with pytest.raises(CollectiveError) as met:
            dist.barrier()
        told.append(str(met.value))
        return time.monotonic() - begin, told


def test_dead_rank(tmp_path: Path) -> None:
    outcomes = run_comm_ranks(3, _check_rank_death, tmp_path, folder=tmp_path)
    for rank in (0, 2):
        assert outcomes[rank].error is None and outcomes[rank].exit_code == 0, outcomes[rank].trace
        seconds, told = outcomes[rank].value
        assert seconds < 5 and all("rank 1 is dead" in text for text in told)


def _check_differing_ranks(world: World, folder: Path) -> str:
    with shm_backend(world, folder, timeout_s=1.0):
        with pytest.raises(CollectiveError) as met:
            dist.all_reduce(torch.ones(3 + world.rank))
        assert met.value.facts["kind"] == "mismatch"
    with shm_backend(world, folder, "again", timeout_s=1.0):
        if world.rank == 0:
            future = dist.all_reduce(torch.ones(3), async_op=True).get_future()
            with pytest.raises(RuntimeError, match="waits for rank 1"):
                future.wait()
        else:
            time.sleep(2.0)
    return str(met.value)


def test_calls_that_differ_and_ranks_that_do_not_come(tmp_path: Path) -> None:
    for text in rank_results(run_comm_ranks(2, _check_differing_ranks, tmp_path, folder=tmp_path)):
        assert "rank 0: all_reduce #2 of 3 float32; rank 1: all_reduce #2 of 4 float32" in text
