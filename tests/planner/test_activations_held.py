"""Activations beside the states of a plan: their sum at its highest, in which memory, on which ranks."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from npuzero.plan import TENSOR, Memory, MeshShape, Placement, Plan, Report
from npuzero.planner import Cluster, ModelShape, TrainingJob, TrainingRun, from_size
from npuzero.planner.model_work.units import ModelWorkload, measure_workload
from npuzero.planner.timing.memory import activation_bytes, estimate_memory

SEQUENCE = 512
MODEL = from_size(50_000_000)
WORK = measure_workload(MODEL, SEQUENCE, 2)


def held_with_activations(
    plan: Plan, mesh: MeshShape, work: ModelWorkload = WORK, cluster: str = "8xa100-80g", rank: int = 0, **run: Any
) -> tuple[dict[str, int], Report]:
    """Return the bytes by memory with activations of a pipeline's rank, and the report without."""
    micro_batches = run.get("micro_batches", 1)
    asked = TrainingRun(plan, mesh, work.micro_batch, **run)
    report = MODEL.predict(plan, mesh, asked.settings, micro_batches=micro_batches)
    return estimate_memory(
        TrainingJob(MODEL, Cluster.named(cluster), SEQUENCE, clip=False), asked, report, work, rank
    ), report


def held_on_device(plan: Plan, mesh: MeshShape, **run: Any) -> int:
    return held_with_activations(plan, mesh, **run)[0][Memory.DEVICE.value]


@pytest.mark.parametrize("recompute", [False, True], ids=["kept", "recomputed"])
@pytest.mark.parametrize("preset", ["zero0", "zero1", "zero2", "zero3", "zero3-keep", "hpz", "offload", "infinity"])
def test_they_are_between_the_highest_of_either_and_the_sum(preset, recompute):
    plan = Plan.preset(preset, precision="bf16")
    found, report = held_with_activations(plan, MeshShape(1, 8), recompute=recompute)
    states = report.memory[Memory.DEVICE.value]
    resting = report.held[Memory.DEVICE]["parameters"] + report.held[Memory.DEVICE]["states"]
    activations = activation_bytes(WORK, recompute)
    assert max(states, resting + activations) <= found[Memory.DEVICE.value] <= states + activations
    assert {k: v for k, v in found.items() if k != "device"} == {
        k: v for k, v in report.memory.items() if k != "device"
    }


def test_gradients_make_room_for_activations_but_not_on_a_cpu():
    """Under zero0 float32 gradients are there from backward on, logits and all activations before; on a CPU both."""
    plan, mesh = Plan.preset("zero0", precision="bf16"), MeshShape(1, 8)
    elsewhere, report = held_with_activations(plan, mesh)
    on_cpu, _ = held_with_activations(plan, mesh, cluster="8xcpu/8")
    everything = report.memory["device"] + activation_bytes(WORK)
    assert elsewhere["device"] < on_cpu["device"] <= everything
    # The last micro-batch's forward meets the gradients of the one before.
    assert held_on_device(plan, mesh, micro_batches=2) > elsewhere["device"]


def test_sharding_and_recomputation_never_take_more():
    mesh = MeshShape(1, 8)
    for recompute in (False, True):
        found = [held_on_device(Plan.preset(stage, precision="bf16"), mesh, recompute=recompute) for stage in range(4)]
        assert found == sorted(found, reverse=True) and found[0] > found[-1]
    for stage in range(4):
        plan = Plan.preset(stage, precision="bf16")
        assert held_on_device(plan, mesh, recompute=True) < held_on_device(plan, mesh, recompute=False)


def test_what_recomputation_keeps_may_rest_on_the_host():
    plan = replace(Plan.preset("zero3", precision="bf16"), activations=Placement((), Memory.HOST))
    mesh = MeshShape(1, 8)
    found, report = held_with_activations(plan, mesh, recompute=True)
    inputs = sum(unit.input_bytes for unit in WORK.units[1:])
    assert inputs == 2 * 2 * SEQUENCE * (len(MODEL.units) - 1) * embedding_width(MODEL)
    assert found["host"] - report.memory["host"] == inputs
    near, _ = held_with_activations(Plan.preset("zero3", precision="bf16"), mesh, recompute=True)
    assert found["device"] < near["device"]
    # Without recomputation nothing of it moves.
    assert held_with_activations(plan, mesh)[0]["host"] == report.memory["host"]


def embedding_width(model: ModelShape) -> int:
    return next(p.shape[1] for p in model.units[0] if p.name == "embed_tokens.weight")


def test_a_stage_of_a_pipeline_holds_the_micro_batches_under_way():
    mesh = MeshShape(1, 2, pipe=4)
    plan = Plan.preset("zero1", precision="bf16")
    own = sum(unit.saved_bytes for unit in WORK.units[1:]) / 4 + WORK.kept[0].left_bytes  # with what the stage gets
    for rank in range(4):
        both = [held_with_activations(plan, mesh, micro_batches=count, rank=rank) for count in (1, 2, 4, 8)]
        found = [memory["device"] - report.memory["device"] for memory, report in both]
        for count, bytes_held in zip((2, 4, 8), found[1:], strict=True):
            assert bytes_held - found[0] == pytest.approx((min(count, 4 - rank) - 1) * own, rel=0.01)


def test_tensor_and_sequence_ranks_divide_them():
    """(10 + 24 / t) / 34 of a block without scores: arXiv:2205.05198, equation 2, less its last term."""
    plan = Plan.preset("zero0", precision="bf16")

    def activations(mesh: MeshShape) -> int:
        found, report = held_with_activations(plan, mesh, cluster="8xcpu/8")
        return found["device"] - report.memory["device"]

    whole = activations(MeshShape(1, 8))
    assert activations(MeshShape(1, 8, sequence=4)) < 0.3 * whole
    blocks = sum(unit.saved_bytes for unit in WORK.units[1:])
    less = whole - activations(MeshShape(1, 4, tensor=2))
    assert less == pytest.approx(blocks * (1 - 22 / 34), rel=0.1)


def test_tensor_ranks_may_keep_a_part_of_inputs_each():
    plan = replace(Plan.preset("zero3", precision="bf16"), activations=Placement((TENSOR,), Memory.DEVICE))
    mesh = MeshShape(1, 4, tensor=2)
    divided = held_on_device(plan, mesh, recompute=True)
    assert divided < held_on_device(Plan.preset("zero3", precision="bf16"), mesh, recompute=True)
