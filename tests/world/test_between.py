"""Tensors kept between micro-batches by ``Plan.between`` move the predicted bytes, and change no bit."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import npuzero
from npuzero import Placement, Plan, Report, Settings, StateError, comm
from npuzero.comm import World
from world.toy import ToyBlock, ToyGPT, TrainingRecipe, build_seeded_model
from world.train import CutSession, State, assert_same_bits, train_by_recipe

SIZE, LOCAL = 4, 2
Axes = tuple[str, ...]


@pytest.fixture(autouse=True)
def folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NPUZERO_NVME_PATHS", str(tmp_path))


def plan_between(preset: str, between: Axes | None, precision: str = "bf16") -> Plan:
    """Return a preset, or with ``+host+parameters`` and the like an offloaded one."""
    row, _, offload = preset.partition("+")
    plan = Plan.preset(row, local_size=LOCAL, precision=precision)
    plan = plan.offloaded(offload) if offload else plan
    return replace(plan, between=None if between is None else Placement(between))


def run_between(plan: Plan, recipe: TrainingRecipe, **settings: Any) -> list[tuple[State, Report]]:
    """Return each rank's final state, and its measurements of the last step."""

    def rank(world: World) -> tuple[State, Report]:
        session = CutSession(build_seeded_model(), world, plan=plan, settings=Settings(**settings))
        norms = train_by_recipe(session, recipe)
        state = {name: value.clone() for name, value in session.state().items()}
        return norms | state, npuzero.report(session.model)

    return comm.run_threads(SIZE, rank)


def assert_between_predicted(plan: Plan, recipe: TrainingRecipe, **settings: Any) -> list[State]:
    """Check that every rank held, sent and moved the predicted bytes; return the final states."""
    facts = {"micro_batches": recipe.micro_batches, "clip": recipe.clip is not None, "settings": Settings(**settings)}
    expected = npuzero.predict(build_seeded_model(), plan, SIZE, **facts)
    found = run_between(plan, recipe, **settings)
    for _, report in found:
        assert report.bytes_sent == expected.bytes_sent
        assert report.held == expected.held
        assert report.bytes_moved == expected.bytes_moved
    return [state for state, _ in found]


# Unsharded, and partly: less than is kept after forward, as much, and more.
CASES = [
    ("zero3", ()),
    ("zero3", ("node",)),
    ("zero3-keep", ()),
    ("zero3-keep", ("node",)),
    ("hpz", ("local",)),
    ("hpz", ()),
    ("hsdp", ()),
    ("zero2", ()),
]
FAR = [
    ("zero3+host", ()),
    ("zero3+host+parameters", ()),
    ("zero3+host+parameters", ("node",)),
    ("zero3+host+parameters", ("node", "local")),
    ("zero3+nvme+parameters", ()),
    ("zero3+nvme+parameters", ("node", "local")),
]
QUICK = [("zero3", ()), ("hpz", ("local",)), ("zero3-keep", ("node",)), ("zero3+host+parameters", ("node", "local"))]


@pytest.mark.parametrize(
    ("preset", "between"),
    [pytest.param(*case, marks=() if case in QUICK else pytest.mark.slow) for case in (*CASES, *FAR)],
)
def test_no_bit_moves_and_bytes_are_as_foretold(preset: str, between: Axes) -> None:
    for micro_batches in (1, 2, 4):
        recipe = TrainingRecipe(steps=3, micro_batches=micro_batches, clip=0.5)
        states = assert_between_predicted(plan_between(preset, between), recipe)
        if micro_batches > 1:
            for state, (plain, _) in zip(states, run_between(plan_between(preset, None), recipe), strict=True):
                assert_same_bits(state, plain)


@pytest.mark.slow
@pytest.mark.parametrize("preset", ["zero3", "zero3+host+parameters", "zero3+nvme+parameters"])
@pytest.mark.parametrize("between", [(), ("node",), ("node", "local")])
@pytest.mark.parametrize("settings", [{"overlap": False}, {"prefetch": 0}, {"prefetch": 3}, {"bucket_bytes": 2048}])
def test_bytes_are_as_foretold_whatever_the_settings(preset: str, between: Axes, settings: dict[str, Any]) -> None:
    assert_between_predicted(
        plan_between(preset, between, "fp32"), TrainingRecipe(steps=3, micro_batches=2), **settings
    )


# -- programs that do more than train ----------------------------------------------------------------------------------


def run_micro_batches(session: CutSession, step: int, count: int = 1, begin: int = 0) -> None:
    for micro_batch in range(begin, begin + count):
        session.loss(step, micro_batch).backward()


@torch.no_grad()
def evaluate_loss(session: CutSession, step: int) -> Tensor:
    return session.loss(step, 9).detach().clone()


def evaluates_within_step(session: CutSession, step: int) -> State:
    """Within a step, and between steps."""
    run_micro_batches(session, step)
    within = evaluate_loss(session, step)
    run_micro_batches(session, step, begin=1)
    return {f"within {step}": within}


def adds_up_alone(session: CutSession, step: int) -> State:
    with session.no_sync():
        run_micro_batches(session, step, 2)
    run_micro_batches(session, step, begin=2)
    return {}


class RefusedForward(RuntimeError):
    """The error of a module."""


@contextmanager
def expect_refused_forward(handle: Any) -> Iterator[None]:
    with pytest.raises(RefusedForward):
        yield
    handle.remove()


def raise_refused_forward(*_: object) -> None:
    raise RefusedForward


def catches_a_forward(session: CutSession, step: int) -> State:
    run_micro_batches(session, step)
    with expect_refused_forward(session.model.blocks[1].register_forward_hook(raise_refused_forward)):
        session.loss(step, 1)
    run_micro_batches(session, step, begin=1)
    return {}


def catches_a_backward(session: CutSession, step: int) -> State:
    """Restart the step."""
    run_micro_batches(session, step)
    with expect_refused_forward(session.model.blocks[1].register_full_backward_hook(raise_refused_forward)):
        session.loss(step, 1).backward()
    session.model.zero_grad()
    run_micro_batches(session, step, 2)
    return {}


def writes_between(session: CutSession, step: int) -> State:
    run_micro_batches(session, step)
    with npuzero.gathered(session.model, write=True), torch.no_grad():
        session.model.blocks[1].qkv.weight.mul_(0.5)
    run_micro_batches(session, step, begin=1)
    return {}


def loads_between(session: CutSession, step: int) -> State:
    run_micro_batches(session, step)
    session.load({name: value * 0.75 for name, value in session.state().items()})
    run_micro_batches(session, step, begin=1)
    return {}


def leaves_between(session: CutSession, step: int) -> State:
    run_micro_batches(session, step)
    with npuzero.offloaded(session.model):
        pass
    run_micro_batches(session, step, begin=1)
    return {}


def begins_two_before_it_ends_one(session: CutSession, step: int) -> State:
    """As a pipeline does."""
    losses = [session.loss(step, 0), session.loss(step, 1)]
    for micro_batch in range(2, 4):
        losses.pop(0).backward()
        losses.append(session.loss(step, micro_batch))
    for loss in losses:
        loss.backward()
    return {}


def uses_less_at_first(session: CutSession, step: int) -> State:
    """One block in the first micro-batch, all in the second."""
    blocks = session.model.blocks
    session.model.blocks = blocks[:1]
    run_micro_batches(session, step)
    session.model.blocks = blocks
    run_micro_batches(session, step, begin=1)
    return {}


class ReentrantToyBlock(ToyBlock):
    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = checkpoint(super().forward, x, use_reentrant=True)
        return found


class ClampingBlock(ToyBlock):
    """A module that writes into its weight in each forward."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.out.weight.clamp_(-0.0625, 0.0625)
        return super().forward(x)


def frozen_below() -> nn.Module:
    model = ToyGPT()
    model.blocks[0].requires_grad_(False)
    model.tokens.weight.requires_grad_(False)
    return model


def three_micro_batches(session: CutSession, step: int) -> State:
    run_micro_batches(session, step, 3)
    return {}


Program = Callable[[CutSession, int], State]
PROGRAMS: dict[str, tuple[Program, Callable[[], nn.Module]]] = {
    "evaluates": (evaluates_within_step, ToyGPT),
    "adds up alone": (adds_up_alone, ToyGPT),
    "catches a forward": (catches_a_forward, ToyGPT),
    "catches a backward": (catches_a_backward, ToyGPT),
    "writes between micro-batches": (writes_between, ToyGPT),
    "loads between micro-batches": (loads_between, ToyGPT),
    "is offloaded between micro-batches": (leaves_between, ToyGPT),
    "begins two before it ends one": (begins_two_before_it_ends_one, ToyGPT),
    "uses less at first": (uses_less_at_first, ToyGPT),
    "checkpoints activations": (three_micro_batches, lambda: ToyGPT(block=ReentrantToyBlock)),
    "writes within a forward": (three_micro_batches, lambda: ToyGPT(block=ClampingBlock)),
    "has frozen blocks below": (three_micro_batches, frozen_below),
}


def train_between(program: Program, make: Callable[[], nn.Module], plan: Plan) -> list[State]:
    def rank(world: World) -> State:
        session = CutSession(build_seeded_model(make=make), world, plan=plan)
        optimizer = session.optimizer(torch.optim.AdamW, [p for p in session.model.parameters() if p.requires_grad])
        found: State = {}
        for step in range(2):
            found |= program(session, step)
            optimizer.step()
            optimizer.zero_grad()
            found[f"after {step}"] = evaluate_loss(session, step)
        return found | {name: value.clone() for name, value in session.state().items()}

    return comm.run_threads(SIZE, rank)


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")  # checkpointing, within an evaluation
@pytest.mark.parametrize("name", PROGRAMS)
@pytest.mark.parametrize(
    ("preset", "between"),
    [("zero3", ()), *(pytest.param(*case, marks=pytest.mark.slow) for case in (*QUICK[1:], ("zero3+nvme", ())))],
)
def test_programs_do_as_they_do_without(name: str, preset: str, between: Axes) -> None:
    expected = train_between(*PROGRAMS[name], plan_between(preset, None))
    for state, plain in zip(train_between(*PROGRAMS[name], plan_between(preset, between)), expected, strict=True):
        assert_same_bits(state, plain)


@pytest.mark.parametrize("lag", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_updates_that_begin_early_or_end_late(lag: int) -> None:
    def rank(world: World, plan: Plan) -> State:
        session = CutSession(build_seeded_model(), world, plan=plan)
        optimizer = npuzero.AdamW(session.model.parameters(), early=not lag)
        for step in range(4):
            run_micro_batches(session, step, 2)
            optimizer.step()
            optimizer.zero_grad()
        return {name: value.clone() for name, value in session.state().items()}

    found, plain = (
        comm.run_threads(SIZE, partial(rank, plan=replace(plan_between("zero3+host", between), lag=lag)))
        for between in ((), None)
    )
    for state, expected in zip(found, plain, strict=True):
        assert_same_bits(state, expected)


def test_a_pipelines_order_gathers_once_a_step() -> None:
    """Four micro-batches, two in flight at a time."""

    def rank(world: World) -> Report:
        session = CutSession(build_seeded_model(), world, plan=plan_between("zero3", ()))
        optimizer = session.optimizer(torch.optim.AdamW)
        for step in range(2):
            begins_two_before_it_ends_one(session, step)
            optimizer.step()
            optimizer.zero_grad()
        session.state()
        return npuzero.report(session.model)

    once = npuzero.predict(build_seeded_model(), plan_between("zero3", ()), SIZE, micro_batches=4).bytes_sent[
        "all_gather"
    ]
    assert (
        8 * once
        == npuzero.predict(build_seeded_model(), plan_between("zero3", None), SIZE, micro_batches=4).bytes_sent[
            "all_gather"
        ]
    )
    assert {report.bytes_sent["all_gather"] for report in comm.run_threads(SIZE, rank)} == {once}


def test_it_lasts_from_the_first_use_to_the_update() -> None:
    """And no evaluation between steps keeps anything."""

    def rank(world: World) -> None:
        session = CutSession(build_seeded_model(), world, plan=plan_between("zero3", ()))
        weight = session.model.blocks[1].qkv.weight
        optimizer = session.optimizer(torch.optim.AdamW)

        def state() -> str:
            with pytest.raises(StateError) as caught:
                weight.sum()
            return str(caught.value)

        for _ in range(2):
            evaluate_loss(session, 0)
            assert "while it is sharded" in state()
            loss = session.loss(0, 0)
            assert "while it is kept within the step" in state()
            loss.backward()
            evaluate_loss(session, 0)
            assert "while it is kept within the step" in state()
            optimizer.step()
            assert "while it is sharded" in state()

    comm.run_threads(SIZE, rank)


def test_units_of_one_model_may_differ() -> None:
    recipe = TrainingRecipe(steps=2, micro_batches=2)

    def rank(world: World) -> Report:
        plan = plan_between("zero3", None)
        session = CutSession(
            build_seeded_model(), world, plan=plan, unit_plans={"blocks.1": replace(plan, between=Placement())}
        )
        train_by_recipe(session, recipe)
        session.state()
        return npuzero.report(session.model)

    plan = plan_between("zero3", None)
    own = {"blocks.1": replace(plan, between=Placement())}
    expected = npuzero.predict(build_seeded_model(), plan, SIZE, micro_batches=2, unit_plans=own)
    for report in comm.run_threads(SIZE, rank):
        assert report.bytes_sent == expected.bytes_sent and report.held == expected.held
