"""Pipelines with a stage that dies; every function runs on each of several processes."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

import npuzero
from npuzero import ops
from npuzero.comm import CountingCommunicator, World
from npuzero.plan import DATA

from .dead_ranks import CULPRIT, kill_me

#: The number of stages, and of data ranks in each stage.
STAGES = 2


class TanhResidualBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = x + self.linear(x).tanh()
        return y


def kill_in_phase(where: str, pipe: Any) -> None:
    """Kill this process inside a forward, a backward, the reduce-scatter (R3) or the update at the given place."""
    block = list(pipe.children())[1]  # its input needs a gradient
    if where == "forward":
        block.register_forward_pre_hook(lambda *_: kill_me())
    elif where == "backward":
        block.register_full_backward_hook(lambda *_: kill_me())
    elif where == "R3":
        CountingCommunicator.all_reduce = _kill_in_collective("reduce", CountingCommunicator.all_reduce)  # type: ignore[method-assign]
    else:
        ops.AdamLine.update = lambda *_, **__: kill_me()  # type: ignore[method-assign]


def _kill_in_collective(word: str, plain: Any) -> Any:
    def call(group: Any, buffer: torch.Tensor, *, tag: str = "") -> Any:
        if tag.startswith(word):
            kill_me()
        return plain(group, buffer, tag=tag)

    return call


def killed_stage(world: World, plan: str, where: str, schedule: str) -> None:
    """Kill the culprit in the second step."""
    mesh = npuzero.mesh(world=world, pipe=STAGES)
    torch.manual_seed(0)
    model = nn.Sequential(*(TanhResidualBlock() for _ in range(4)))
    chunks = 2 if schedule == "interleaved" else 1
    options = {"schedule": schedule, "micro_batches": 4, "chunks": chunks}
    pipe = npuzero.pipeline(model, mesh, plan=plan, loss_fn=nn.functional.mse_loss, **options)
    optimizer = npuzero.AdamW(pipe.parameters(), lr=1e-3)
    for step in range(4):
        if step == 1 and world.rank == CULPRIT:
            kill_in_phase(where, pipe)
        x = torch.randn(8, 8, generator=torch.Generator().manual_seed(10 * step + mesh.index(DATA)))
        pipe.step(x, target=x)
        optimizer.step()
        optimizer.zero_grad()
