"""The clock along tensor, sequence and pipeline ranks: what they divide, what they send, what they wait for."""

from __future__ import annotations

from collections import Counter

import pytest

from npuzero.config import Settings
from npuzero.errors import ConfigError
from npuzero.plan import MeshShape, Plan
from npuzero.planner import Cluster, ModelShape, TrainingJob, TrainingRun, from_size
from npuzero.planner.hardware.network import collective_s
from npuzero.planner.model_work.axes import LayerTraffic, divide_model_shape
from npuzero.planner.model_work.units import ModelWorkload, measure_workload
from npuzero.planner.timing.clock import StepTimeline, step_time

BLOCKS, SEQUENCE, RANKS = 12, 1024, 16


@pytest.fixture(scope="module")
def model() -> ModelShape:
    return from_size(200_000_000, ranks=8)


@pytest.fixture(scope="module")
def work(model: ModelShape) -> ModelWorkload:
    return measure_workload(model, SEQUENCE)


def time_axes_step(model: ModelShape, work: ModelWorkload, mesh: MeshShape, **facts: object) -> StepTimeline:
    run = TrainingRun(Plan.preset("zero1", precision="bf16"), mesh, **facts)
    return step_time(TrainingJob(model, Cluster.named(f"{RANKS}xa100-80g"), SEQUENCE), run, work)


def test_tensor_ranks_divide_products_and_wait_for_their_layers(model: ModelShape, work: ModelWorkload):
    alone, four = (
        time_axes_step(model, work, MeshShape(1, 1)),
        time_axes_step(divide_model_shape(model, 4), work, MeshShape(1, 1, tensor=4)),
    )
    assert four.parts["products"] == pytest.approx(alone.parts["products"] / 4)
    assert four.parts["element-wise"] < alone.parts["element-wise"]
    assert four.parts["wait for layers"] == pytest.approx(four.busy["layers"])
    assert four.tokens == alone.tokens / 4
    again = time_axes_step(divide_model_shape(model, 4), work, MeshShape(1, 1, tensor=4), recompute=True)
    assert 1.2 < again.busy["layers"] / four.busy["layers"] <= 1.5, "each block's forward is sent again"


def test_what_layers_send_is_megatrons(model: ModelShape, work: ModelWorkload):
    """Four all_reduce a block: of attention's and the feed-forward layer's output, and of the gradients of their
    inputs (Shoeybi et al., arXiv:1909.08053, section 3); in slices all_gather and reduce_scatter instead.
    """
    mesh = MeshShape(1, 1, tensor=4)
    width = model.units[0][0].shape[1]
    whole = LayerTraffic.of(divide_model_shape(model, 4), mesh)
    assert whole.sent[1:] == (((("all_reduce", ("tensor",), width),) * 4),) * BLOCKS
    sliced = LayerTraffic.of(divide_model_shape(from_size(200_000_000, ranks=8), 4, "msp"), mesh)
    counts = Counter(verb for verb, _, features in sliced.sent[1] if features == width)
    assert counts == {"all_gather": 4, "reduce_scatter": 4}
    cluster = Cluster.named(f"{RANKS}xa100-80g")
    seconds = whole.seconds(cluster, mesh, Plan.preset("zero1", precision="bf16"), SEQUENCE)
    nbytes = SEQUENCE * width * 2
    assert seconds[1] == pytest.approx(4 * collective_s(cluster, mesh, "all_reduce", ("tensor",), nbytes))


def test_sequence_ranks_divide_all_and_swap_around_attention(model: ModelShape, work: ModelWorkload):
    alone, two = time_axes_step(model, work, MeshShape(1, 1)), time_axes_step(model, work, MeshShape(1, 2, sequence=2))
    assert two.parts["products"] == pytest.approx(alone.parts["products"] / 2)
    assert two.tokens == alone.tokens / 2
    sent = LayerTraffic.of(model, MeshShape(1, 2, sequence=2)).sent
    assert [len(unit) for unit in sent] == [0, *[8] * BLOCKS]
    assert {verb for unit in sent for verb, _, _ in unit} == {"all_to_all"}


def test_a_pipeline_waits_for_its_bubble(model: ModelShape, work: ModelWorkload):
    """(p - 1) / m of what a stage computes (Narayanan et al., arXiv:2104.04473, section 2.2), and the way there."""
    mesh = MeshShape(1, 1, pipe=4)
    few, many = (time_axes_step(model, work, mesh, micro_batches=m) for m in (4, 32))
    assert few.parts["bubble"] == pytest.approx(many.parts["bubble"])
    for timeline, m in ((few, 4), (many, 32)):
        own = timeline.step_s - timeline.parts["bubble"] - timeline.parts["update"]
        assert timeline.parts["bubble"] == pytest.approx(3 / m * own, rel=0.05)
        assert sum(timeline.parts.values()) == pytest.approx(timeline.step_s)
    alone = time_axes_step(model, work, MeshShape(1, 1), micro_batches=32)
    assert many.step_s < alone.step_s
    apart = time_axes_step(model, work, mesh, micro_batches=32, settings=Settings(overlap=False))
    assert apart.parts["wait for stages"] == pytest.approx(apart.busy["stages"])


def test_three_axes_together(model: ModelShape, work: ModelWorkload):
    mesh = MeshShape(1, 2, tensor=4, pipe=2)
    timeline = time_axes_step(divide_model_shape(model, 4), work, mesh, micro_batches=8)
    assert {"layers", "stages", "reduce", "compute"} <= set(timeline.busy)
    assert sum(timeline.parts.values()) == pytest.approx(timeline.step_s)
    assert timeline.tokens == 2 * 8 * SEQUENCE / 16


def test_what_cannot_be_is_refused(model: ModelShape, work: ModelWorkload):
    with pytest.raises(ConfigError, match="whose layers are divided over them"):
        time_axes_step(model, work, MeshShape(1, 1, tensor=4))
    with pytest.raises(ConfigError, match="a block for each stage"):
        time_axes_step(model, work, MeshShape(1, 1, pipe=16))
