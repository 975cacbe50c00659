"""Activation checkpointing within the stages of a pipeline: the weights of the same steps without a pipeline."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import npuzero
from npuzero import comm
from npuzero.comm import World
from npuzero.plan import DATA
from world.conftest import one_thread_per_rank  # noqa: F401
from world.toy import build_seeded_model
from world.train import assert_same_bits, assert_states_close

STEPS = 2


class RecomputedBlock(nn.Module):
    """Recompute its middle, or all of it (``whole``), in backward; it also has parameters outside its layers."""

    def __init__(self, reentrant: bool, whole: bool) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(8), nn.Linear(8, 16), nn.Linear(16, 8)
        self.scale = nn.Parameter(torch.ones(8))
        self.reentrant, self.whole, self.within = reentrant, whole, False

    def middle(self, x: Tensor) -> Tensor:
        return x + self.scale * self.down(torch.tanh(self.up(self.norm(x))))

    def forward(self, x: Tensor) -> Tensor:
        if not self.training or self.within or not torch.is_grad_enabled():
            return self.middle(x)
        if not self.whole:
            return checkpoint(self.middle, x, use_reentrant=self.reentrant)
        return checkpoint(self._again, x, use_reentrant=self.reentrant)

    def _again(self, x: Tensor) -> Tensor:
        self.within = True
        try:
            return self(x)
        finally:
            self.within = False


def build_recomputed_net(reentrant: bool, whole: bool) -> nn.Module:
    return build_seeded_model(
        make=lambda: nn.Sequential(nn.Linear(8, 8), *(RecomputedBlock(reentrant, whole) for _ in range(4)))
    )


def recomputed_batch(step: int, index: int) -> Tensor:
    return torch.randn(8, 8, generator=torch.Generator().manual_seed(10 * step + index))


def train_recomputed_rank(world: World, plan: str, schedule: str, reentrant: bool, whole: bool) -> dict[str, Tensor]:
    mesh = npuzero.mesh(pipe=2, local_size=1, world=world)
    given: dict[str, Any] = {"micro_batches": 4, "loss_fn": F.mse_loss, "split": [2, 3]}
    pipe = npuzero.pipeline(build_recomputed_net(reentrant, whole), mesh, plan=plan, schedule=schedule, **given)
    optimizer = npuzero.AdamW(pipe.parameters(), lr=1e-2, eps=1e-3)
    losses = []
    for step in range(STEPS):
        x = recomputed_batch(step, mesh.index(DATA))
        losses.append(pipe.step(x, target=-x))
        optimizer.step()
        optimizer.zero_grad()
    return {"losses": torch.stack(losses), **npuzero.full_state_dict(pipe, rank0_only=False)}


def train_recomputed_plain(data: int) -> dict[str, Tensor]:
    model = build_recomputed_net(False, False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-3)
    losses = []
    for step in range(STEPS):
        x = torch.cat([recomputed_batch(step, index) for index in range(data)])
        loss = F.mse_loss(model(x), -x)
        loss.backward()
        losses.append(loss.detach())
        optimizer.step()
        optimizer.zero_grad()
    return {"losses": torch.stack(losses), **model.state_dict()}


@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("plan", ["zero1", "zero3", "hsdp", "offload3"])
def test_zero_bubble_trains_as_1f1b(plan: str, reentrant: bool, whole: bool) -> None:
    runs = [
        comm.run_threads(
            4, partial(train_recomputed_rank, plan=plan, schedule=schedule, reentrant=reentrant, whole=whole)
        )
        for schedule in ("1f1b", "zero-bubble")
    ]
    for a, b in zip(*runs, strict=True):
        assert_states_close(b, a, 1e-6)
        assert_same_bits(b, runs[1][0])
    assert_states_close(runs[1][0], train_recomputed_plain(2), 1e-5)
