"""A rank leaves a call by an exception, catches it and makes no further call: the remaining ranks report it."""

from __future__ import annotations

import re
import threading
import time
import warnings
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import npuzero
from faults.fault_ranks import run_faulty_ranks
from npuzero import comm
from npuzero.comm import World

CULPRIT = 1
WARN_S = 0.8


class RaiseInBackward(torch.autograd.Function):
    """Raise in backward."""

    @staticmethod
    def forward(ctx: Any, value: Tensor) -> Tensor:
        return value.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        raise RuntimeError("boom in backward")


class RaisingLayer(nn.Module):
    """A layer that raises on request."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)
        self.raises = ""

    def forward(self, value: Tensor) -> Tensor:
        if self.raises == "forward":
            raise ValueError("boom in forward\nand a second line")
        value = self.layer(value)
        return RaiseInBackward.apply(value) if self.raises == "backward" else value  # type: ignore[no-any-return]


def build_raising_step(world: World, raises: str) -> tuple[nn.Module, Callable[[], None]]:
    """Return a model, and a step in which ``raises`` names the place that raises on the culprit."""
    net = nn.Sequential(nn.ModuleList([RaisingLayer(), RaisingLayer()])[0], RaisingLayer())
    model = npuzero.zero(net, stage=3, world=world)
    optimizer = npuzero.AdamW(model.parameters(), lr=1e-2)

    def step() -> None:
        net[1].raises = raises if world.rank == CULPRIT else ""
        model(torch.ones(2, 8)).sum().backward()
        closure = None
        if raises == "optimizer.step":
            closure = torch.tensor if world.rank == CULPRIT else lambda: None  # TypeError
        optimizer.step(closure)
        optimizer.zero_grad()

    return model, step


def run_left_step(world: World, raises: str, told: threading.Event) -> None:
    """Run a step that raises on the culprit, which catches the error and makes no call until a warning names it."""
    world.board.warn_s = WARN_S
    _, step = build_raising_step(world, raises)
    if world.rank == CULPRIT:
        with pytest.raises((ValueError, RuntimeError, TypeError)):
            step()
        told.wait(30.0)
        world.abort("the test is over")
        return
    with pytest.raises(npuzero.CollectiveError):
        step()


def collect_warnings(body: Callable[[World, threading.Event], object], size: int = 3) -> list[str]:
    """Return the warnings of ``body(world, told)`` on threads as ranks; the first warning sets ``told``."""
    told, said = threading.Event(), list[str]()

    def show(message: Warning | str, *_: Any, **__: Any) -> None:
        if "has waited for" in str(message):
            said.append(str(message))
            told.set()

    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.showwarning = show
        comm.run_threads(size, lambda world: body(world, told))
    return said


@pytest.mark.parametrize(
    ("raises", "text"),
    [
        ("forward", r"left forward, called at test_left_calls\.py:\d+, by ValueError: boom in forward at"),
        ("backward", r"left backward, called at test_left_calls\.py:\d+, by an exception at"),
        ("optimizer.step", r"left optimizer\.step, called at test_left_calls\.py:\d+, by TypeError: .* at"),
    ],
)
def test_the_others_name_the_rank_the_call_the_exception_and_the_time(raises: str, text: str) -> None:
    said = collect_warnings(lambda world, told: run_left_step(world, raises, told))
    assert len(said) == 1, said
    assert re.search(rf"on rank 0, in .* has waited for \d+ s: rank {CULPRIT} {text} \d\d:\d\d:\d\d", said[0]), said[0]
    assert "and has called nothing since" in said[0]


def test_a_rank_that_calls_again_is_not_named() -> None:
    """An earlier exception no longer counts: the rank has made calls since, and computes."""

    def body(world: World, told: threading.Event) -> None:
        world.board.warn_s = WARN_S
        model, _ = build_raising_step(world, "")
        if world.rank == CULPRIT:
            with pytest.raises(TypeError):
                model()
        model(torch.ones(2, 8))
        if world.rank == CULPRIT:
            assert not told.wait(4 * WARN_S)
        world.exchange(0)

    assert collect_warnings(body) == []


def test_a_block_within_gathered_is_left_too() -> None:
    def body(world: World, told: threading.Event) -> None:
        world.board.warn_s = WARN_S
        model, _ = build_raising_step(world, "")
        if world.rank == CULPRIT:
            with pytest.raises(ZeroDivisionError), npuzero.gathered(model):
                raise ZeroDivisionError("within")
            told.wait(30.0)
            world.abort("the test is over")
        else:
            with pytest.raises(npuzero.CollectiveError), npuzero.gathered(model):
                pass

    said = collect_warnings(body)
    assert len(said) == 1
    assert f"rank {CULPRIT} left gathered" in said[0]
    assert "ZeroDivisionError: within" in said[0]


def write_rank_warning(world: World, path: str) -> None:
    """Write rank 0's warnings to ``path``; the culprit exits once there is one."""
    warnings.simplefilter("always")
    warnings.showwarning = lambda message, *_, **__: Path(path).write_text(str(message))
    world.board.warn_s = WARN_S
    _, step = build_raising_step(world, "forward")
    if world.rank != CULPRIT:
        step()
        return
    with suppress(ValueError):
        step()
    deadline_s = time.monotonic() + 60.0
    while not Path(path).exists() and time.monotonic() < deadline_s:
        time.sleep(0.05)


@pytest.mark.world
@pytest.mark.parametrize("backend", [None, pytest.param("gloo", marks=pytest.mark.slow)])
def test_processes(backend: str | None, tmp_path: Path) -> None:
    path = tmp_path / "said"
    outcomes = run_faulty_ranks(write_rank_warning, 2, str(path), timeout_s=90.0, backend=backend)
    assert outcomes[0].seen.kind == "CollectiveError", outcomes[0].seen
    assert f"rank {CULPRIT} left forward" in path.read_text()
    assert "ValueError: boom in forward at" in path.read_text()
