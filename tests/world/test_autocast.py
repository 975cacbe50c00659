"""Autocast over float32 parameters: the same under every plan, checkpointed or not, and no copy outlives its unit."""

from __future__ import annotations

import weakref
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import npuzero
from npuzero import comm
from npuzero.comm import World
from world.toy import ToyGPT, build_seeded_model
from world.train import CutSession, Session, State, assert_same_bits, assert_states_close, run_cut, run_plain

PLANS = ("zero0", "zero1", "zero3", "zero3-keep", "hsdp")
every_plan = pytest.mark.parametrize(
    "plan", [pytest.param(plan, marks=() if plan in PLANS else pytest.mark.slow) for plan in npuzero.PRESETS]
)


class CheckpointedToyGPT(ToyGPT):
    """A model that recomputes its blocks' activations in backward."""

    reentrant = False

    def run_blocks(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=self.reentrant)
        return x


class ReentrantToyGPT(CheckpointedToyGPT):
    reentrant = True


MODELS = {"plain": ToyGPT, "checkpointed": CheckpointedToyGPT, "reentrant": ReentrantToyGPT}


def bf16_autocast() -> torch.autocast:
    return torch.autocast("cpu", dtype=torch.bfloat16)


def autocast_scenario(session: Session) -> State:
    """Two micro-batches a step, one of them with its backward inside the context."""
    optimizer = session.optimizer(torch.optim.SGD, lr=0.05, momentum=0.9)
    for step in range(3):
        with bf16_autocast():
            first = session.loss(step, 0)
            session.loss(step, 1).backward()
        first.backward()
        session.clip(1.0)
        optimizer.step()
        optimizer.zero_grad()
    return {}


@cache
def train_autocast(plan: str, model: str) -> State:
    states = run_cut(autocast_scenario, 4, MODELS[model], plan=plan, local_size=2)
    for state in states[1:]:
        assert_same_bits(state, states[0])
    return states[0]


@every_plan
@pytest.mark.parametrize("model", MODELS)
def test_training_is_plain_torchs(plan: str, model: str) -> None:
    """Weights that differ in the last bit may round to another bfloat16, which moves a gradient by an
    eighth of a percent.
    """
    assert_states_close(train_autocast(plan, model), plain_autocast(), bound=2e-3)
    assert all(value.dtype is torch.float32 for value in train_autocast(plan, model).values())


@cache
def plain_autocast() -> State:
    return run_plain(autocast_scenario, 4)


@every_plan
def test_checkpointing_changes_no_bit(plan: str) -> None:
    for model in ("checkpointed", "reentrant"):
        assert_same_bits(train_autocast(plan, model), train_autocast(plan, "plain"))


class CastCounter(TorchDispatchMode):
    """Count the bfloat16 copies of parameters made so far that are still alive."""

    def __init__(self) -> None:
        super().__init__()
        self._made: list[weakref.ref[Tensor]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if (
            func is torch.ops.aten._to_copy.default
            and out.dtype is torch.bfloat16
            and isinstance(args[0], nn.Parameter)
        ):
            self._made.append(weakref.ref(out))
        return out

    def alive(self) -> int:
        return sum(reference() is not None for reference in self._made)

    def made(self) -> int:
        return len(self._made)


@pytest.mark.parametrize("plan", ["zero3", "zero3-keep"])
def test_the_cache_keeps_no_copy_of_what_is_released(plan: str) -> None:
    """Each block's four matrices and three biases are copied; no copy outlives its block."""

    def rank(world: World) -> list[tuple[int, int]]:
        session = CutSession(build_seeded_model(make=CheckpointedToyGPT), world, plan=plan)
        seen: list[tuple[int, int]] = []
        with CastCounter() as casts:
            for after_block in (*session.model.blocks[1:], session.model.norm):
                after_block.register_forward_pre_hook(lambda *_: seen.append((casts.made(), casts.alive())))
            with bf16_autocast():
                session.loss()
        return seen

    for seen in comm.run_threads(2, rank):
        assert seen == [(7, 0), (14, 0), (21, 0)]
