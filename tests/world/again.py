"""Ranks that join again: programs for each rank of several processes."""

from __future__ import annotations

import os
import time

import pytest
import torch

import npuzero
from npuzero import CollectiveError, ConfigError
from npuzero.comm import World
from world.toy import build_seeded_model, toy_loss, toy_tokens


def _train_to_vector(world: World, plan: str) -> torch.Tensor:
    model = npuzero.zero(build_seeded_model(), plan=plan, world=world)
    optimizer = npuzero.AdamW(model.parameters(), lr=1e-2)
    for step in range(2):
        toy_loss(model, toy_tokens(step, 0, world.rank)).backward()
        optimizer.step()
        optimizer.zero_grad()
    state = npuzero.full_state_dict(model, rank0_only=False)
    return torch.cat([value.reshape(-1).float() for value in state.values()])


def leaves_and_joins_again(world: World, rounds: int, backend: str | None) -> None:
    """Run each round in a new world; no two ranks are equally fast."""
    first = None
    for turn in range(rounds):
        time.sleep(0.07 * ((world.rank + turn) % world.size))
        assert world.exchange([turn, world.rank]) == [[turn, rank] for rank in range(world.size)]
        trained = _train_to_vector(world, ("zero3", "zero1")[turn % 2])
        first = trained if first is None else first
        torch.testing.assert_close(trained, first)
        world.exchange("trained")
        world.close()
        time.sleep(0.05 * ((world.rank + 2 * turn) % world.size))
        before, world = world, npuzero.init("cpu", backend=backend)
        assert world is not before and not world.closed


def joins_twice(world: World) -> None:
    """The second call asks for the same settings, or for none."""
    for _ in range(2):
        assert npuzero.init() is world
        assert npuzero.init("cpu", timeout_s=world.timeout_s) is world
        assert world.exchange(["first", world.rank]) == [["first", rank] for rank in range(world.size)]
    assert npuzero.comm.current_world() is world


def joins_otherwise(world: World) -> None:
    with pytest.raises(ConfigError, match=r"init: timeout_s: expected 10.0, .* got 99") as met:
        npuzero.init("cpu", timeout_s=99)
    assert "world.close()" in met.value.do
    with pytest.raises(ConfigError, match="init: backend: expected none"):
        npuzero.init("cpu", backend="gloo")
    assert world.exchange(1) == [1] * world.size


def keeper_ends(world: World, then: str) -> None:
    """Rank 0 keeps the store, as under mpirun and srun, and its program is shorter."""
    model = npuzero.zero(build_seeded_model(), plan="zero1", world=world)
    world.exchange("all are here")
    if world.rank == 0:
        time.sleep(0.5)
        os._exit(0)
    time.sleep(1.0)
    begin_s = time.monotonic()
    with pytest.raises(CollectiveError) as met:
        if then == "exchange":
            world.exchange("more")
        elif then == "a new communicator":
            world.communicator(range(world.size), "new")
        elif then == "a save":
            npuzero.checkpoint.save(f"/tmp/never-{os.getpid()}", model, step=1)
        else:
            world.close()
            npuzero.init("cpu")
    text = str(met.value)
    assert f"the store of rank 0 at 127.0.0.1:{os.environ['MASTER_PORT']}" in text, text
    assert "torchrun" in met.value.do and "outlive" in met.value.do, text
    assert time.monotonic() - begin_s < 3
