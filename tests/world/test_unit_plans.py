"""Units of one model with separate plans: each is stored as its plan says, and trains as in torch."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
import torch

import npuzero
from npuzero import ConfigError, Precision, comm
from npuzero.checkpoint import load, save
from npuzero.comm import World
from world.toy import TrainingRecipe, build_seeded_model
from world.train import CutSession, State, assert_same_bits, check_equals_plain, run_cut, train_by_recipe

#: By a model's plan, those of its units: cut and whole, over one group of ranks and over all, in both orders.
MIXTURES = {
    "zero2": {"blocks.0": "zero3", "blocks.1": "zero1", "blocks.2": "hsdp"},
    "zero3": {"root": "zero0", "blocks.1": "zero3-keep", "blocks.2": "hpz"},
    "zero1.5": {"root": 3, "blocks.0": "mics", "blocks.2": "zero2"},
}
mixtures = pytest.mark.parametrize("plan", MIXTURES)
ONE = TrainingRecipe(steps=3)
TWO = TrainingRecipe(steps=3, micro_batches=2, clip=0.5, groups=True)
FOUR_RANKS = {"size": 4, "local_size": 2}


@mixtures
@pytest.mark.parametrize("recipe", [ONE, TWO], ids=["plain", "two micro-batches, clipped, two groups"])
def test_training_equals_plain_torch(plan: str, recipe: TrainingRecipe) -> None:
    check_equals_plain(partial(train_by_recipe, recipe=recipe), plan=plan, unit_plans=MIXTURES[plan], **FOUR_RANKS)


def test_stages_may_be_mixed_without_moving_a_bit() -> None:
    scenario = partial(train_by_recipe, recipe=TrainingRecipe(steps=3, clip=0.5, groups=True))
    mixed = run_cut(scenario, plan="zero1", unit_plans={"blocks.0": 3, "blocks.2": 2, "root": 0}, **FOUR_RANKS)
    for state, uniform in zip(mixed, run_cut(scenario, plan="zero3", **FOUR_RANKS), strict=True):
        assert_same_bits(state, uniform)


@mixtures
@pytest.mark.parametrize("p", [1.0, 2.0, float("inf")])
def test_norms_are_those_of_one_plan(plan: str, p: float) -> None:
    """Sums over flats of different cuts are put together."""

    def norms(world: World, **plans: object) -> tuple[float, dict[str, float]]:
        session = CutSession(build_seeded_model(), world, local_size=2, **plans)
        session.loss().backward()
        each = npuzero.grad_norms(session.model, p)
        return float(npuzero.clip_grad_norm_(session.model, 1e9, p)), each

    def rank(world: World) -> None:
        mixed, each = norms(world, plan=plan, unit_plans=MIXTURES[plan])
        uniform, expected = norms(world, plan="zero1")
        assert mixed == pytest.approx(uniform, rel=1e-6)
        assert each == pytest.approx(expected, rel=1e-5, abs=1e-9)

    comm.run_threads(4, rank)


@mixtures
def test_a_checkpoint_goes_into_any_mixture(plan: str, tmp_path: Path) -> None:
    def rank(world: World) -> tuple[State, State]:
        first = CutSession(build_seeded_model(), world, plan=plan, unit_plans=MIXTURES[plan], local_size=2)
        optimizer = first.optimizer(torch.optim.AdamW, lr=1e-2)
        first.loss().backward()
        optimizer.step()
        optimizer.zero_grad()
        save(tmp_path / "run", first.model, optimizer, step=1)
        second = CutSession(
            build_seeded_model(seed=1), world, plan="hsdp", unit_plans={"blocks.1": "zero3"}, local_size=2
        )
        other = second.optimizer(torch.optim.AdamW, lr=1e-2)
        load(tmp_path / "run", second.model, other)
        return first.state(), second.state()

    for saved, loaded in comm.run_threads(4, rank):
        assert_same_bits(saved, loaded)


@mixtures
@pytest.mark.parametrize(
    "recipe", [ONE, TrainingRecipe(steps=3, micro_batches=2, clip=0.5)], ids=["plain", "two, clipped"]
)
def test_report_equals_predict(plan: str, recipe: TrainingRecipe) -> None:
    def rank(world: World) -> npuzero.Report:
        session = CutSession(build_seeded_model(), world, plan=plan, unit_plans=MIXTURES[plan], local_size=2)
        train_by_recipe(session, recipe)
        session.state()
        return npuzero.report(session.model)

    facts = {"micro_batches": recipe.micro_batches, "clip": recipe.clip is not None}
    expected = npuzero.predict(build_seeded_model(), plan, 4, unit_plans=MIXTURES[plan], local_size=2, **facts)
    for report in comm.run_threads(4, rank):
        assert report.bytes_sent == expected.bytes_sent
        assert report.bytes_held == expected.bytes_held


@pytest.mark.parametrize(
    ("unit_plans", "says"),
    [
        ({"block.0": 3}, "names of units: root, blocks.0"),
        ({"blocks.0": "zero9"}, "one of zero0"),
        ({"blocks.0": npuzero.Plan.preset("hsdp", local_size=7)}, "local_size"),
        ({"blocks.0": npuzero.Plan.preset(3, precision=Precision(matmul="tf32"), local_size=1)}, "matmul"),
        (["zero3"], "unit_plans"),
    ],
)
def test_what_cannot_be_is_refused(unit_plans: object, says: str) -> None:
    for make in (
        partial(npuzero.zero, stage=1, world=comm.SingleWorld()),
        partial(npuzero.predict, plan="zero1", world=2),
    ):
        with pytest.raises(ConfigError, match=says):
            make(build_seeded_model(), unit_plans=unit_plans, local_size=1)
