"""Faults on one rank of several processes; every function runs on each rank."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import npuzero
from npuzero import ops
from npuzero.comm import World
from world.toy import build_seeded_model

#: The rank that fails: neither the first nor the last.
CULPRIT = 1


def dead_rank_loss(model: nn.Module, rank: int) -> Tensor:
    return model(torch.arange(rank, rank + 12)[None]).square().mean()


def kill_me() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def train_with_fault(world: World, stage: str, steps: int, at: Callable[[str, int, Any], object]) -> None:
    """Train, and call ``at(place, step, model)`` before each part of a step."""
    model = npuzero.zero(build_seeded_model(), plan=stage, world=world)
    optimizer = npuzero.AdamW(model.parameters(), lr=1e-3)
    for step in range(steps):
        at("forward", step, model)
        loss = dead_rank_loss(model, world.rank)
        at("backward", step, model)
        loss.backward()
        at("step", step, model)
        optimizer.step()
        optimizer.zero_grad()
        at("between", step, model)


def killed_in_step(world: World, stage: str, where: str) -> None:
    """Kill the culprit inside forward, inside backward, inside the optimizer's update, or between steps."""

    def at(place: str, step: int, model: Any) -> None:
        if world.rank != CULPRIT or step != 1 or place != where:
            return
        if where == "forward":
            model.blocks[1].register_forward_pre_hook(lambda *_: kill_me())
        elif where == "backward":
            model.blocks[1].register_full_backward_hook(lambda *_: kill_me())
        elif where == "step":
            ops.AdamLine.update = lambda *_, **__: kill_me()  # type: ignore[method-assign]
        else:
            kill_me()

    train_with_fault(world, stage, 4, at)


def raises_in_forward(world: World, stage: str) -> None:
    """Raise in the culprit's forward; its process then ends."""

    def at(place: str, step: int, model: Any) -> None:
        if world.rank == CULPRIT and step == 1 and place == "forward":
            raise ZeroDivisionError("a fault of the user's own")

    train_with_fault(world, stage, 4, at)


def fewer_steps(world: World, stage: str) -> None:
    """Exit the culprit after two of four steps."""
    train_with_fault(world, stage, 2 if world.rank == CULPRIT else 4, lambda *_: None)


def never_comes(world: World, stage: str, where: str) -> None:
    """Keep the culprit alive, but never let it join a collective."""

    def at(place: str, step: int, model: Any) -> None:
        if world.rank == CULPRIT and step == 1 and place == where:
            time.sleep(2 * world.timeout_s)

    train_with_fault(world, stage, 4, at)


def skips_block(world: World, stage: str) -> None:
    """Leave a block out of the culprit's forward."""
    model = npuzero.zero(build_seeded_model(), plan=stage, world=world)
    optimizer = npuzero.AdamW(model.parameters(), lr=1e-3)
    if world.rank == CULPRIT:
        model.blocks = nn.ModuleList([model.blocks[0], model.blocks[2]])
    for _ in range(3):
        dead_rank_loss(model, world.rank).backward()
        optimizer.step()
        optimizer.zero_grad()


def evaluates_alone(world: World, stage: str) -> None:
    """Evaluate on rank 0 only."""

    def at(place: str, step: int, model: Any) -> None:
        if world.rank == 0 and step == 1 and place == "between":
            with torch.no_grad():
                model(torch.zeros(1, 12, dtype=torch.int64))

    train_with_fault(world, stage, 4, at)


def saves_alone(world: World, stage: str) -> None:
    """Ask for the full weights on rank 0 only."""

    def at(place: str, step: int, model: Any) -> None:
        if world.rank == 0 and step == 1 and place == "between":
            npuzero.full_state_dict(model)

    train_with_fault(world, stage, 4, at)


def skips_step(world: World, stage: str) -> None:
    """Leave out one optimizer step on the culprit."""
    model = npuzero.zero(build_seeded_model(), plan=stage, world=world)
    optimizer = npuzero.AdamW(model.parameters(), lr=1e-3)
    for step in range(4):
        dead_rank_loss(model, world.rank).backward()
        if not (world.rank == CULPRIT and step == 1):
            optimizer.step()
        optimizer.zero_grad()


def skips_backward(world: World, stage: str) -> None:
    """Leave out one backward pass on the culprit, as for a nan loss."""
    model = npuzero.zero(build_seeded_model(), plan=stage, world=world)
    optimizer = npuzero.AdamW(model.parameters(), lr=1e-3)
    for step in range(4):
        loss = dead_rank_loss(model, world.rank)
        if not (world.rank == CULPRIT and step == 1):
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def dies_before_zero(world: World, stage: str) -> None:
    if world.rank == CULPRIT:
        kill_me()
    train_with_fault(world, stage, 1, lambda *_: None)


def dies_in_zero(world: World, stage: str) -> None:
    if world.rank == CULPRIT:
        world.exchange = lambda *_: kill_me()  # type: ignore[assignment,method-assign]
    train_with_fault(world, stage, 1, lambda *_: None)
