"""With parts off the device, a rank's held, sent and moved bytes equal the table's arithmetic; on 2 × 2 ranks."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import npuzero
from npuzero import Memory, Plan, Settings, comm
from npuzero.comm import World
from npuzero.plan import OFFLOADED
from world.toy import TrainingRecipe, build_seeded_model
from world.train import CutSession, train_by_recipe

SIZE, LOCAL = 4, 2
PRECISIONS = ("fp32", "bf16", "bf16-split", "bf16-stochastic", "bf16-8bit")
ONE, THREE = TrainingRecipe(steps=3), TrainingRecipe(steps=3, micro_batches=3, clip=0.5)


@pytest.fixture(autouse=True)
def folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NPUZERO_NVME_PATHS", str(tmp_path))


def offloaded_plan(name: str, precision: str, share: float = 1.0) -> Plan:
    """Return a preset, or with ``+host`` and the like an offloaded one, with a share of its states off the device."""
    row, _, offload = name.partition("+")
    plan = Plan.preset(row, precision=precision, local_size=LOCAL)
    plan = plan.offloaded(offload) if offload else plan
    return replace(plan, states=replace(plan.states, share=share))


def assert_far_predicted(plan: Plan, recipe: TrainingRecipe, **settings: Any) -> None:
    """Check that every rank held, sent and moved the predicted bytes."""
    chosen = Settings(**settings)
    facts = {"micro_batches": recipe.micro_batches, "clip": recipe.clip is not None}
    expected = npuzero.predict(build_seeded_model(), plan, SIZE, settings=chosen, **facts)

    def rank(world: World) -> npuzero.Report:
        session = CutSession(build_seeded_model(), world, plan=plan, settings=chosen)
        train_by_recipe(session, recipe)
        session.state()
        return npuzero.report(session.model)

    for number, report in enumerate(comm.run_threads(SIZE, rank)):
        assert report.bytes_moved == expected.bytes_moved, number
        assert (report.bytes_sent, report.sent_along) == (expected.bytes_sent, expected.sent_along), number
        assert report.held == expected.held, number
    far = {memory for memory in (plan.states.memory, plan.gradients.memory) if memory is not Memory.DEVICE}
    assert all(any(expected.held[memory].values()) for memory in far)
    assert any(expected.bytes_moved.values()) or chosen.update_on == "device"


def test_zero_with_offload_follows_the_plan_that_predict_is_told() -> None:
    """By name as by placements: ``zero(stage=3, offload="host")``."""

    def rank(world: World) -> npuzero.Report:
        session = CutSession(build_seeded_model(), world, stage=3, offload="host", precision="bf16")
        train_by_recipe(session, ONE)
        session.state()
        return npuzero.report(session.model)

    expected = npuzero.predict(build_seeded_model(), 3, SIZE, offload="host", precision="bf16")
    for report in comm.run_threads(SIZE, rank):
        assert (report.held, report.bytes_moved) == (expected.held, expected.bytes_moved)
        assert report.plan == expected.plan and report.plan.name == "zero3+host"


QUICK = (("offload", "bf16-8bit"), ("offload3", "fp32"), ("infinity-states", "bf16"), ("infinity", "bf16-split"))


@pytest.mark.parametrize(
    ("name", "precision"),
    [
        pytest.param(name, precision, marks=() if (name, precision) in QUICK else pytest.mark.slow)
        for name in OFFLOADED
        for precision in PRECISIONS
    ],
)
def test_presets_of_offload(name: str, precision: str) -> None:
    plan = offloaded_plan(name, precision)
    assert_far_predicted(plan, ONE)
    assert_far_predicted(plan, THREE, chunk_bytes=4096)
    assert_far_predicted(plan, ONE, chunk_bytes=1 << 14, overlap=False)


@pytest.mark.parametrize(
    ("name", "precision", "share"),
    [
        ("zero1+host", "bf16-split", 0.6),
        pytest.param("zero0+host", "bf16", 1.0, marks=pytest.mark.slow),
        pytest.param("zero1.5+host", "bf16-stochastic", 0.3, marks=pytest.mark.slow),
        ("hsdp+host", "bf16", 0.5),
        pytest.param("hpz+host", "bf16-8bit", 0.9, marks=pytest.mark.slow),
        pytest.param("zero3-keep+host", "fp32", 1.0, marks=pytest.mark.slow),
        pytest.param("hsdp+nvme", "bf16-8bit", 0.7, marks=pytest.mark.slow),
        ("zero1+nvme", "bf16-8bit", 0.5),
        pytest.param("hpz+nvme", "fp32", 0.2, marks=pytest.mark.slow),
        pytest.param("hpz+nvme+parameters", "bf16", 1.0, marks=pytest.mark.slow),
        ("zero3-keep+nvme+parameters", "fp32", 1.0),
        pytest.param("hsdp+host+parameters", "bf16-split", 1.0, marks=pytest.mark.slow),
        pytest.param("zero0+nvme+parameters", "bf16-8bit", 1.0, marks=pytest.mark.slow),
    ],
)
def test_any_row_offloaded_and_any_share(name: str, precision: str, share: float) -> None:
    plan = offloaded_plan(name, precision, share)
    assert_far_predicted(plan, THREE, chunk_bytes=4096)
    assert_far_predicted(plan, ONE, overlap="gradients", update_on="device")


def test_units_may_rest_in_different_memories() -> None:
    own = {
        "blocks.1": "zero1",
        "blocks.2": offloaded_plan("infinity", "bf16"),
        "blocks.0": offloaded_plan("offload", "bf16"),
        "root": offloaded_plan("hsdp+host+parameters", "bf16"),
    }
    chosen = Settings(chunk_bytes=8192)

    def rank(world: World) -> npuzero.Report:
        session = CutSession(
            build_seeded_model(), world, stage=3, local_size=LOCAL, precision="bf16", unit_plans=own, settings=chosen
        )
        train_by_recipe(session, THREE)
        session.state()
        return npuzero.report(session.model)

    facts = {"local_size": LOCAL, "precision": "bf16", "unit_plans": own, "settings": chosen}
    expected = npuzero.predict(build_seeded_model(), 3, SIZE, micro_batches=3, clip=True, **facts)
    for report in comm.run_threads(SIZE, rank):
        assert (report.held, report.bytes_moved) == (expected.held, expected.bytes_moved)
        assert report.bytes_sent == expected.bytes_sent
