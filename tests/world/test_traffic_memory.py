"""The bytes a rank holds and sends match the table's arithmetic: `report` equals `predict`, on 8 threads as 2 × 4."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import npuzero
from npuzero import Plan, Precision, Report, Settings, comm
from npuzero.api.model import engine_of
from npuzero.comm import World
from npuzero.plan import FlatSize, MeshShape, StepSpec, predict_bytes
from world.toy import ToyBlock, ToyGPT, TrainingRecipe, build_seeded_model
from world.train import CutSession, train_by_recipe

SIZE, LOCAL = 8, 4
MESH = MeshShape(SIZE // LOCAL, LOCAL)
every_plan = pytest.mark.parametrize("plan", npuzero.PRESETS)

#: Steps enough to reach the steady state: in the first one it is not yet known which backward pass is the last.
ONE, TWO = TrainingRecipe(steps=3), TrainingRecipe(steps=3, micro_batches=2, clip=0.5)
RECIPES = {
    "plain": ONE,
    "clipped": TrainingRecipe(steps=3, clip=0.5),
    "two micro-batches": TrainingRecipe(steps=3, micro_batches=2),
    "two micro-batches, clipped": TWO,
}


QUICK = (("fp32", "plain"), ("bf16", "plain"), ("bf16", "two micro-batches, clipped"))
CASES = [
    pytest.param(
        precision, recipe, marks=() if (precision, name) in QUICK else pytest.mark.slow, id=f"{precision} {name}"
    )
    for precision in ("fp32", "bf16")
    for name, recipe in RECIPES.items()
]


def measure_reports(recipe: TrainingRecipe, **options: Any) -> list[Report]:
    """Return each rank's measurements of the last step."""

    def rank(world: World) -> Report:
        session = CutSession(build_seeded_model(), world, local_size=LOCAL, **options)
        train_by_recipe(session, recipe)
        session.state()  # a rank that leaves now would take its part of the last step's gather with it
        return npuzero.report(session.model)

    return comm.run_threads(SIZE, rank)


def predict_report(recipe: TrainingRecipe, plan: str, **options: Any) -> Report:
    facts = {"micro_batches": recipe.micro_batches, "clip": recipe.clip is not None}
    return npuzero.predict(build_seeded_model(), plan, SIZE, local_size=LOCAL, **facts, **options)


def assert_traffic_predicted(recipe: TrainingRecipe, plan: str, **options: Any) -> None:
    """Check that every rank sent and held the predicted bytes."""
    expected = predict_report(recipe, plan, **options)
    for rank, report in enumerate(measure_reports(recipe, plan=plan, **options)):
        assert (report.bytes_sent, report.sent_along) == (expected.bytes_sent, expected.sent_along)
        assert report.world == expected.world == SIZE and report.plan == expected.plan
        assert report.held == expected.held, rank


@pytest.mark.checkered
@every_plan
@pytest.mark.parametrize(("precision", "recipe"), CASES)
def test_report_equals_predict(plan: str, precision: str, recipe: TrainingRecipe) -> None:
    assert_traffic_predicted(recipe, plan, precision=precision)


@pytest.mark.checkered
@pytest.mark.parametrize("plan", ["zero1", "zero3", "hsdp"])
@pytest.mark.parametrize("moments", ["fp32", "bf16", "int8"])
@pytest.mark.parametrize("masters", ["split", "none", "fp32"])
def test_report_equals_predict_however_states_are_stored(plan: str, masters: str, moments: str) -> None:
    assert_traffic_predicted(ONE, plan, precision=Precision(torch.bfloat16, masters=masters, moments=moments))


#: Cut as deep as can be and held in between, summed in two levels; the others are swept by `make test-all`.
QUICK_PLANS = [
    pytest.param(plan, marks=() if plan in ("hpz", "hsdp") else pytest.mark.slow) for plan in npuzero.PRESETS
]
WIRES = {
    "bf16 reduced in fp32": Precision(torch.bfloat16, wires=torch.float32),
    "fp32 reduced in bf16": Precision(torch.float32, wires=torch.bfloat16),
    "fp16": Precision(torch.float16),
    "fp16 reduced in bf16": Precision(torch.float16, wires=torch.bfloat16),
    "as they come, reduced in bf16": Precision(wires=torch.bfloat16),
    "thin": Precision(torch.bfloat16, gathers="int8", wires="int4"),
    "thin between nodes, with feedback": Precision(wires={"node": "int4"}, gathers="int8", feedback="node"),
    "thin inside nodes, sums rounded": Precision(torch.bfloat16, wires={"local": "int8"}, sums="wire"),
}


@pytest.mark.checkered
@pytest.mark.parametrize("plan", QUICK_PLANS)
@pytest.mark.parametrize("precision", WIRES.values(), ids=WIRES)
def test_wires_of_another_dtype(plan: str, precision: Precision) -> None:
    assert_traffic_predicted(TWO, plan, precision=precision)


@pytest.mark.parametrize("plan", ["zero0", "zero1.5", "hsdp", pytest.param("mics", marks=pytest.mark.slow)])
@pytest.mark.parametrize("recipe", [ONE, TWO], ids=["plain", "two micro-batches, clipped"])
def test_sums_that_travel_as_wires(plan: str, recipe: TrainingRecipe) -> None:
    assert_traffic_predicted(recipe, plan, precision=Precision(torch.bfloat16, sums="wire"))


@pytest.mark.slow
@every_plan
@pytest.mark.parametrize("recipe", [ONE, TWO], ids=["plain", "two micro-batches, clipped"])
@pytest.mark.parametrize("wires", [torch.float32, torch.bfloat16])
def test_sums_that_travel_as_wires_of_another_dtype(plan: str, recipe: TrainingRecipe, wires: torch.dtype) -> None:
    assert_traffic_predicted(recipe, plan, precision=Precision(wires=wires, sums="wire"))


def test_gradients_travel_in_the_wires_dtype_and_parameters_in_their_own() -> None:
    elements = SIZE * 256 * 64
    sent = {}
    for name, precision in {"own": Precision(torch.bfloat16), "fp32": WIRES["bf16 reduced in fp32"]}.items():
        plan = Plan.preset("zero3", precision=precision, local_size=LOCAL)
        report = predict_bytes(plan, [FlatSize(0, elements, torch.bfloat16)], MESH, StepSpec(1))
        sent[name] = report.bytes_sent
    assert sent["own"]["all_gather"] == sent["fp32"]["all_gather"] == 2 * elements * 2 * 7 // 8
    assert 2 * sent["own"]["reduce_scatter"] == sent["fp32"]["reduce_scatter"] == elements * 4 * 7 // 8


SETTINGS = {
    "no overlap": Settings(overlap=False),
    "gradients overlap": Settings(overlap="gradients"),
    "parameters overlap": Settings(overlap="parameters"),
    "no prefetch": Settings(prefetch=0),
    "far prefetch": Settings(prefetch=3),
    "small buckets": Settings(bucket_bytes=2048),
}


@pytest.mark.checkered
@pytest.mark.parametrize("plan", [*QUICK_PLANS, *npuzero.THINNED])
@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
def test_report_equals_predict_whatever_the_settings(plan: str, settings: Settings) -> None:
    assert_traffic_predicted(TWO, plan, settings=settings)


def build_half_frozen() -> ToyGPT:
    """Every block has frozen parameters, as with adapters."""
    return ToyGPT(block=lambda dim, frozen_norm: ToyBlock(dim, frozen_norm=True))


@pytest.mark.parametrize("plan", ["zero3", "hpz"])
@pytest.mark.parametrize("prefetch", [0, 1])
def test_a_unit_that_has_frozen_parameters_is_left_after_the_next_is_reached(plan: str, prefetch: int) -> None:
    """So one unit more is unsharded at a time, and counted."""
    settings = Settings(prefetch=prefetch)

    def rank(world: World) -> Report:
        session = CutSession(
            build_seeded_model(make=build_half_frozen), world, local_size=LOCAL, plan=plan, settings=settings
        )
        train_by_recipe(session, ONE)
        session.state()
        return npuzero.report(session.model)

    expected = npuzero.predict(build_half_frozen(), plan, SIZE, local_size=LOCAL, settings=settings)
    for report in comm.run_threads(SIZE, rank):
        assert (report.bytes_held, report.bytes_sent) == (expected.bytes_held, expected.bytes_sent)


@every_plan
def test_predict_needs_no_data(plan: str) -> None:
    with torch.device("meta"):
        model = ToyGPT()
    assert npuzero.predict(model, plan, SIZE, local_size=LOCAL) == predict_report(ONE, plan)


#: Elements a rank sends per step of a model of ψ parameters with 1 and with 2 micro-batches, in units of ψ; and what it
#: keeps of parameters, gradients and states between steps, in shares of the full size. Eight ranks as 2 × 4.
TABLE = {
    "zero0": (1.750, 1.750, 1, 1, 1),
    "zero1": (1.750, 1.750, 1, 1, 8),
    "zero2": (1.750, 2.625, 1, 8, 8),
    "zero3": (2.625, 5.250, 8, 8, 8),
    "zero3-keep": (1.750, 3.500, 8, 8, 8),
    "hpz": (2.500, 5.000, 8, 8, 8),
    "hsdp": (2.500, 4.750, 4, 4, 4),
    "mics": (2.500, 4.750, 4, 4, 4),
    "zero1.5": (1.750, 1.750, 1, 1, 4),
}


@every_plan
def test_the_designs_table(plan: str) -> None:
    elements = SIZE * 128 * 64
    flat = FlatSize(0, elements, torch.float32)
    *traffic, parameters, gradients, states = TABLE[plan]
    for micro_batches, expected in zip((1, 2), traffic, strict=True):
        preset = Plan.preset(plan, local_size=LOCAL)
        report = predict_bytes(preset, [flat], MESH, StepSpec(1, micro_batches))
        sent = sum(nbytes for verb, nbytes in report.bytes_sent.items() if verb != "control")
        assert sent == expected * elements * 4
        assert report.bytes_held["parameters"] == elements * 4 // parameters
        assert report.bytes_held["gradients"] == elements * 4 // gradients
        assert report.bytes_held["states"] == 2 * elements * 4 // states


#: The README's figures of traffic, in bytes of the parameters (ψ), many ranks in few groups: fp32; bf16, where sums
#: travel in float32; bf16, where they travel as wires do.
README_TRAFFIC = {
    "zero0": (2, 3, 2),
    "zero1": (2, 2, 2),
    "zero1.5": (2, 2, 2),
    "zero2": (2, 2, 2),
    "zero3": (3, 3, 3),
    "zero3-keep": (2, 2, 2),
    "hpz": (3, 3, 3),
    "hsdp": (3, 3, 3),
    "mics": (3, 3, 3),
}
BEYOND = {"zero1.5": (2, 3, 2), "hsdp": (2, 3, 2), "mics": (2, 3, 2)}


@every_plan
def test_the_readmes_traffic(plan: str) -> None:
    """Within 1 % of the rounded column: 1000 ranks in groups of 500, which share the excess."""
    mesh, elements = MeshShape(2, 500), 1000 * 256 * 100
    precisions = (Precision(torch.float32), Precision(torch.bfloat16), Precision(torch.bfloat16, sums="wire"))
    for precision, psi in zip(precisions, README_TRAFFIC[plan], strict=True):
        flat = FlatSize(0, elements, precision.parameter_of(torch.float32))
        row = Plan.preset(plan, precision=precision, local_size=500)
        sent = predict_bytes(row, [flat], mesh, StepSpec(1)).bytes_sent
        payload = sum(nbytes for verb, nbytes in sent.items() if verb != "control")
        assert payload == pytest.approx(psi * elements * flat.dtype.itemsize, rel=0.01)


@pytest.mark.parametrize("plan", BEYOND)
def test_the_readmes_traffic_beyond_a_group(plan: str) -> None:
    """Return the excess of 1000 groups of 2 over a single group, in shares of a group."""
    elements = 2000 * 256 * 100
    precisions = (Precision(torch.float32), Precision(torch.bfloat16), Precision(torch.bfloat16, sums="wire"))
    for precision, psi in zip(precisions, BEYOND[plan], strict=True):
        flat = FlatSize(0, elements, precision.parameter_of(torch.float32))
        row = Plan.preset(plan, precision=precision, local_size=2)
        many, alone = (
            sum(predict_bytes(row, [flat], MeshShape(groups, 2), StepSpec(0)).bytes_sent.values())
            for groups in (1000, 1)
        )
        assert many - alone == pytest.approx(psi * elements * flat.dtype.itemsize / 2, rel=0.01)


def test_under_no_sync_gradients_are_sent_once_and_kept_whole() -> None:
    """Three backward passes, all but the last under no_sync: one reduction, and gradients unsharded until then."""

    def rank(world: World) -> tuple[Report, int]:
        session = CutSession(build_seeded_model(), world, local_size=LOCAL, plan="zero2")
        optimizer = session.optimizer(torch.optim.AdamW, lr=1e-2)
        for step in range(3):
            with session.no_sync():
                with session.no_sync():
                    session.loss(step, 0).backward()
                session.loss(step, 1).backward()
            session.loss(step, 2).backward()
            optimizer.step()
            optimizer.zero_grad()
        session.state()
        return npuzero.report(session.model), sum(
            p.nbytes for p in build_seeded_model().parameters() if p.requires_grad
        )

    once = predict_report(ONE, "zero2")
    for report, whole in comm.run_threads(SIZE, rank):
        assert report.bytes_sent == once.bytes_sent
        assert report.bytes_held["buffers"] >= once.bytes_held["buffers"] + whole


def test_a_step_without_overlap_holds_one_wire() -> None:
    with_overlap, without = (measure_reports(ONE, plan="zero2", settings=Settings(overlap=o))[0] for o in (True, False))
    assert without.bytes_held["buffers"] < with_overlap.bytes_held["buffers"]
    assert without.bytes_sent == with_overlap.bytes_sent


@every_plan
@pytest.mark.parametrize("capturable", [False, True])
def test_gradients_hold_nothing_while_the_next_forward_does(
    plan: str, capturable: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """But where a graph may have their addresses."""
    monkeypatch.setattr("npuzero.shard.step.step_boundary.LENT_BYTES", 1)

    def rank(world: World) -> list[int]:
        session = CutSession(build_seeded_model(), world, plan=plan, local_size=2)
        optimizer = session.optimizer(torch.optim.AdamW, lr=1e-2, capturable=capturable)
        held = engine_of(session.model).spaces[npuzero.Memory.DEVICE].held
        seen = [held["gradients"]]
        for step in range(3):
            loss = session.loss(step)
            seen.append(held["gradients"])
            loss.backward()
            optimizer.step()
            seen.append(held["gradients"])
            optimizer.zero_grad()
        session.state()
        return seen

    full = npuzero.predict(build_seeded_model(), plan, 4, local_size=2).bytes_held["gradients"]
    for seen in comm.run_threads(4, rank):
        between = full if capturable else 0
        assert seen == [0, 0, full, between, full, between, full]


@pytest.mark.checkered
@pytest.mark.parametrize("plan", [*npuzero.PRESETS, *npuzero.THINNED])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_steady_step_allocates_nothing(plan: str, precision: str) -> None:
    """From the second step on the engine has every buffer it needs."""

    def rank(world: World) -> list[int]:
        session = CutSession(build_seeded_model(), world, plan=plan, precision=precision, local_size=2)
        optimizer = session.optimizer(torch.optim.AdamW, lr=1e-2)
        made = []
        for step in range(5):
            for micro_batch in range(2):
                session.loss(step, micro_batch).backward()
            session.clip(0.5)
            optimizer.step()
            optimizer.zero_grad()
            made.append(engine_of(session.model).spaces[npuzero.Memory.DEVICE].allocations)
        session.state()
        return made

    for made in comm.run_threads(4, rank):
        assert 0 < made[1] == made[-1]
