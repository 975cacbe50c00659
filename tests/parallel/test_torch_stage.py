"""torch's pipeline schedules drive stages that npuzero shards: losses, norms and weights equal plain torch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import npuzero
from npuzero import ConfigError, StateError
from npuzero.comm import World
from world.comm_ranks import rank_results, run_comm_ranks

pytestmark = pytest.mark.world

DIM, MICRO_BATCHES, ROWS, STEPS = 6, 4, 8, 3


def build_tanh_stack() -> nn.Sequential:
    torch.manual_seed(5)
    return nn.Sequential(*[nn.Sequential(nn.Linear(DIM, DIM), nn.Tanh()) for _ in range(4)])


def torch_stage_batch(step: int, rank: int) -> tuple[Tensor, Tensor]:
    drawn = torch.randn(2, ROWS, DIM, generator=torch.Generator().manual_seed(10 * step + rank))
    return drawn[0], drawn[1]


def train_tanh_stack_plain(data: int, clip: float) -> tuple[list[float], list[float], dict[str, Tensor]]:
    """Return losses, norms and weights of one process with all data."""
    net = build_tanh_stack()
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2, eps=1e-4)
    losses, norms = [], []
    for step in range(STEPS):
        x, y = (torch.cat(both) for both in zip(*(torch_stage_batch(step, rank) for rank in range(data)), strict=True))
        loss = F.mse_loss(net(x), y)
        loss.backward()
        norms.append(nn.utils.clip_grad_norm_(net.parameters(), clip).item())
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, norms, net.state_dict()


def train_torch_pipeline(world: World, kind: str, chunks: int, plan: Any, no_sync: bool, shapes: bool) -> None:
    """Train over two pipeline ranks; the remaining factor is data ranks."""
    from torch.distributed import pipelining

    mesh = npuzero.mesh(pipe=2, world=world)
    data, stages = world.size // 2, 2 * chunks
    pipe, place = divmod(world.rank, data)
    groups = [dist.new_group([place, place + data]) for place in range(data)]
    group, size = groups[place], 4 // stages
    rows, (parts, held) = ROWS // MICRO_BATCHES, ([], [])
    for number in range(pipe, stages, 2):
        example = {"input_args": torch.empty(rows, DIM, requires_grad=number > 0)} if shapes else {}
        example |= {"output_args": torch.empty(rows, DIM, requires_grad=True)} if shapes else {}
        part = npuzero.zero(build_tanh_stack()[number * size : (number + 1) * size], plan=plan, mesh=mesh)
        parts.append(part)
        held.append(npuzero.parallel.TorchStage(part, number, stages, world.device, group, no_sync=no_sync, **example))
    schedule = getattr(pipelining, kind)(held if chunks > 1 else held[0], MICRO_BATCHES, loss_fn=F.mse_loss)
    optimizer = npuzero.AdamW([p for part in parts for p in part.parameters()], lr=1e-2, eps=1e-4)
    clip = 0.1 if chunks == 1 else float("inf")  # a norm spans one model per rank: over the whole pipeline
    expected_losses, expected_norms, weights = train_tanh_stack_plain(data, clip)
    for step in range(STEPS):
        x, y = torch_stage_batch(step, place)
        losses: list[Tensor] = []
        schedule.step(*((x,) if pipe == 0 else ()), target=y if pipe else None, losses=losses, return_outputs=False)
        if chunks == 1:
            assert npuzero.clip_grad_norm_(parts[0], clip).item() == pytest.approx(expected_norms[step], rel=1e-5)
        optimizer.step()
        optimizer.zero_grad()
        if pipe:
            mean = torch.stack(losses).mean()[None] / data
            mesh.communicator(("node", "local"), "control").all_reduce(mean).wait()
            assert mean.item() == pytest.approx(expected_losses[step], rel=1e-5)
    for part in parts:
        for name, value in npuzero.full_state_dict(part, rank0_only=False).items():
            torch.testing.assert_close(value, weights[name], rtol=1e-4, atol=1e-6)


def run_torch_schedules(world: World) -> None:
    plan = npuzero.Plan.preset("zero3")
    train_torch_pipeline(world, "ScheduleGPipe", 1, "zero0", False, False)
    train_torch_pipeline(world, "Schedule1F1B", 1, plan, False, True)
    train_torch_pipeline(world, "Schedule1F1B", 1, "zero2", True, False)
    train_torch_pipeline(world, "ScheduleInterleaved1F1B", 2, plan, True, False)


@pytest.mark.slow
@pytest.mark.parametrize("size", [2, 4])
def test_training_equals_plain_torch(size: int, tmp_path: Path) -> None:
    rank_results(run_comm_ranks(size, run_torch_schedules, folder=tmp_path, limit_s=120.0))


def test_what_it_cannot_drive_is_refused() -> None:
    with pytest.raises(StateError, match=r"npuzero\.zero"):
        npuzero.parallel.TorchStage(build_tanh_stack(), 0, 1, torch.device("cpu"))
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        stage = npuzero.parallel.TorchStage(npuzero.zero(build_tanh_stack()), 0, 1, torch.device("cpu"))
        with pytest.raises(ConfigError, match="zero bubble"):
            stage.backward_one_chunk(0, full_backward=False)
    finally:
        dist.destroy_process_group()
