"""Steps skipped without a loss scale, and steps without a gradient for some parameter."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import npuzero
from npuzero import ConfigError, Settings, StateError, comm
from npuzero.comm import World
from world.toy import build_seeded_model, toy_loss, toy_tokens
from world.train import CutSession, Session, assert_same_bits, run_cut

#: By step, on which of two ranks the loss is infinite.
BAD = {1: 0, 2: 1, 4: 0}
STEPS = 6
OPTIMIZERS: dict[str, tuple[type[torch.optim.Optimizer], dict[str, Any]]] = {
    "AdamW": (torch.optim.AdamW, {"lr": 3e-3}),
    "momentum": (torch.optim.SGD, {"lr": 1e-2, "momentum": 0.9}),
}


def train_skipping_steps(session: Session, kind: str, steps: list[int], clip: float | None, looks: bool) -> None:
    """Train with a check for inf and NaN, or with automatic skips of the bad steps."""
    chosen, options = OPTIMIZERS[kind]
    optimizer = session.optimizer(chosen, **options)
    for step in steps:
        bad = BAD.get(step) == session.ranks[0]
        for micro_batch in range(2):
            loss = session.loss(step, micro_batch)
            (loss * math.inf if bad and micro_batch == 1 else loss).backward()
        if looks:
            assert npuzero.skip_nonfinite_(session.model).item() == (step in BAD)
        if clip is not None:
            session.clip(clip)
        optimizer.step()
        optimizer.zero_grad()


PLANS = ("zero0", "zero1", "zero2", "zero3")


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("kind, plan", [("AdamW", "offload"), *((kind, plan) for kind in OPTIMIZERS for plan in PLANS)])
def test_a_skipped_step_leaves_no_trace(plan: str, kind: str, precision: str) -> None:
    clip = 0.5 if precision == "fp32" else None

    def looking(session: Session) -> None:
        train_skipping_steps(session, kind, list(range(STEPS)), clip, looks=True)

    def by_hand(session: Session) -> None:
        train_skipping_steps(session, kind, [step for step in range(STEPS) if step not in BAD], clip, looks=False)

    found, expected = (run_cut(scenario, 2, plan=plan, precision=precision) for scenario in (looking, by_hand))
    for rank in range(2):
        assert_same_bits(found[rank], expected[rank])


def test_the_host_waits_for_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> None:
        raise AssertionError("a value was asked for")

    def rank(world: World) -> None:
        model = npuzero.zero(build_seeded_model(), 3, world=world)
        optimizer = npuzero.AdamW(model.parameters())
        for _ in range(2):
            toy_loss(model, toy_tokens(0, 0, 0)).backward()
            with monkeypatch.context() as patch:
                for name in ("item", "tolist", "__bool__", "__float__", "__int__", "__index__", "cpu", "numpy"):
                    patch.setattr(Tensor, name, refuse)
                npuzero.skip_nonfinite_(model)
                npuzero.clip_grad_norm_(model, 1.0)
                optimizer.step()
            optimizer.zero_grad()

    comm.run_threads(1, rank)


def test_without_gradients_there_is_nothing_to_skip() -> None:
    def rank(world: World) -> bool:
        model = npuzero.zero(nn.Linear(3, 3), 1, world=world)
        return bool(npuzero.skip_nonfinite_(model))

    assert comm.run_threads(2, rank) == [False, False]


# -- parameters that take no part --------------------------------------------------------------------------------------


class SkippableBranches(nn.Module):
    """Two layers behind one, of which a rank may leave out either."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.left = nn.Linear(4, 4)
        self.right = nn.Linear(4, 4)
        self.right.bias.requires_grad_(False)
        self.way = "both"

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        used = {"both": (self.left, self.right), "left": (self.left,), "right": (self.right,)}[self.way]
        return torch.stack([layer(x) for layer in used]).sum(0)


def build_branches(world: World, stage: int, **settings: Any) -> tuple[nn.Module, Any, Callable[[str], None]]:
    model = npuzero.zero(
        build_seeded_model(make=SkippableBranches),
        stage,
        world=world,
        settings=Settings(ignore_unused_parameters=False, **settings),
    )
    optimizer = npuzero.AdamW(model.parameters(), lr=0.1)

    def backward(way: str) -> None:
        model.way = way
        model(torch.ones(2, 4)).square().mean().backward()

    return model, optimizer, backward


@pytest.mark.parametrize("stage", range(4))
@pytest.mark.parametrize("ways", [("left", "left"), ("both", "left")], ids=["nowhere", "on one rank"])
def test_an_unused_parameter_stops_every_rank(stage: int, ways: tuple[str, str]) -> None:
    """By name and without a trace; then training continues. Frozen parameters need no gradient."""

    def rank(world: World) -> None:
        model, optimizer, backward = build_branches(world, stage)
        backward("both")
        optimizer.step()
        optimizer.zero_grad()
        before = npuzero.full_state_dict(model, rank0_only=False)
        backward(ways[world.rank])
        for call in (optimizer.step, lambda: npuzero.clip_grad_norm_(model, 1.0)):
            with pytest.raises(StateError, match=r"none, on some rank, of right\.weight\.") as error:
                call()
            assert error.value.facts["parameters"] == ["right.weight"]
        assert_same_bits(npuzero.full_state_dict(model, rank0_only=False), before)
        optimizer.zero_grad()
        backward("left")  # a step of two passes, in which all take part
        backward("right")
        optimizer.step()
        optimizer.zero_grad()
        model.right.weight.requires_grad_(False)
        backward("left")
        optimizer.step()

    comm.run_threads(2, rank)


def test_one_rank_alone_is_told_and_a_step_without_a_backward_pass_is_none() -> None:
    def rank(world: World) -> None:
        _, optimizer, backward = build_branches(world, 3)
        optimizer.step()
        backward("right")
        with pytest.raises(StateError, match=r"left\.weight, left\.bias\."):
            optimizer.step()

    comm.run_threads(1, rank)


def test_it_is_left_out_by_default() -> None:
    def rank(world: World) -> bool:
        session = CutSession(build_seeded_model(), world, plan="zero2")
        optimizer = session.optimizer(torch.optim.AdamW, lr=0.1)
        session.loss().backward()
        optimizer.step()
        return torch.equal(session.state()["unused"], torch.ones(5))

    assert comm.run_threads(2, rank) == [True, True]


def test_an_update_that_begins_early_cannot_wait_for_the_question() -> None:
    def rank(world: World) -> None:
        settings = Settings(ignore_unused_parameters=False)
        model = npuzero.zero(build_seeded_model(make=SkippableBranches), plan="offload", world=world, settings=settings)
        optimizer = npuzero.AdamW(model.parameters(), early=True)
        model(torch.ones(2, 4)).sum().backward()
        with pytest.raises(ConfigError, match=r"ignore_unused_parameters=False.*without early=True"):
            optimizer.step()

    comm.run_threads(2, rank)
