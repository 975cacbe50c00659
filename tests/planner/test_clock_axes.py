"""The clock along tensor, sequence and pipeline ranks: what they divide, what they send, what they wait for."""

from __future__ import annotations

from collections import Counter

import pytest

from npuzero.config import Settings
from npuzero.errors import ConfigError
from npuzero.plan import MeshShape, Plan
from npuzero.planner import Cluster, Job, ModelShape, Run, from_size
from npuzero.planner.axes import Layers, divided
from npuzero.planner.clock import Timeline, step_time
from npuzero.planner.network import collective_s
from npuzero.planner.workload import Workload, workload

BLOCKS, SEQUENCE, RANKS = 12, 1024, 16


@pytest.fixture(scope="module")
def model() -> ModelShape:
    return from_size(200_000_000, ranks=8)


@pytest.fixture(scope="module")
def work(model: ModelShape) -> Workload:
    return workload(model, SEQUENCE)


def timed(model: ModelShape, work: Workload, mesh: MeshShape, **facts: object) -> Timeline:
    run = Run(Plan.preset("zero1", precision="bf16"), mesh, **facts)
    return step_time(Job(model, Cluster.named(f"{RANKS}xa100-80g"), SEQUENCE), run, work)


def test_tensor_ranks_divide_products_and_wait_for_their_layers(model: ModelShape, work: Workload):
    alone, four = timed(model, work, MeshShape(1, 1)), timed(divided(model, 4), work, MeshShape(1, 1, tensor=4))
    assert four.parts["products"] == pytest.approx(alone.parts["products"] / 4)
    assert four.parts["element-wise"] < alone.parts["element-wise"]
    assert four.parts["wait for layers"] == pytest.approx(four.busy["layers"])
    assert four.tokens == alone.tokens / 4
    again = timed(divided(model, 4), work, MeshShape(1, 1, tensor=4), recompute=True)
    assert 1.2 < again.busy["layers"] / four.busy["layers"] <= 1.5, "each block's forward is sent again"


def test_what_layers_send_is_megatrons(model: ModelShape, work: Workload):
    """Four all_reduce a block: of attention's and the feed-forward layer's output, and of the gradients of their
    inputs (Shoeybi et al., arXiv:1909.08053, section 3); in slices all_gather and reduce_scatter instead.
    """
    mesh = MeshShape(1, 1, tensor=4)
    width = model.units[0][0].shape[1]
    whole = Layers.of(divided(model, 4), mesh)
    assert whole.sent[1:] == (((("all_reduce", ("tensor",), width),) * 4),) * BLOCKS
    sliced = Layers.of(divided(from_size(200_000_000, ranks=8), 4, "msp"), mesh)
    counts = Counter(verb for verb, _, features in sliced.sent[1] if features == width)
    assert counts == {"all_gather": 4, "reduce_scatter": 4}
    cluster = Cluster.named(f"{RANKS}xa100-80g")
    seconds = whole.seconds(cluster, mesh, Plan.preset("zero1", precision="bf16"), SEQUENCE)
    nbytes = SEQUENCE * width * 2
    assert seconds[1] == pytest.approx(4 * collective_s(cluster, mesh, "all_reduce", ("tensor",), nbytes))


def test_sequence_ranks_divide_all_and_swap_around_attention(model: ModelShape, work: Workload):
    alone, two = timed(model, work, MeshShape(1, 1)), timed(model, work, MeshShape(1, 2, sequence=2))
    assert two.parts["products"] == pytest.approx(alone.parts["products"] / 2)
    assert two.tokens == alone.tokens / 2
    sent = Layers.of(model, MeshShape(1, 2, sequence=2)).sent
    assert [len(unit) for unit in sent] == [0, *[8] * BLOCKS]
    assert {verb for unit in sent for verb, _, _ in unit} == {"all_to_all"}


def test_a_pipeline_waits_for_its_bubble(model: ModelShape, work: Workload):
    """(p - 1) / m of what a stage computes (Narayanan et al., arXiv:2104.04473, section 2.2), and the way there."""
    mesh = MeshShape(1, 1, pipe=4)
    few, many = (timed(model, work, mesh, micro_batches=m) for m in (4, 32))
    assert few.parts["bubble"] == pytest.approx(many.parts["bubble"])
    for timeline, m in ((few, 4), (many, 32)):
        own = timeline.step_s - timeline.parts["bubble"] - timeline.parts["update"]
        assert timeline.parts["bubble"] == pytest.approx(3 / m * own, rel=0.05)
        assert sum(timeline.parts.values()) == pytest.approx(timeline.step_s)
    alone = timed(model, work, MeshShape(1, 1), micro_batches=32)
    assert many.step_s < alone.step_s
    apart = timed(model, work, mesh, micro_batches=32, settings=Settings(overlap=False))
    assert apart.parts["wait for stages"] == pytest.approx(apart.busy["stages"])


def test_three_axes_together(model: ModelShape, work: Workload):
    mesh = MeshShape(1, 2, tensor=4, pipe=2)
    timeline = timed(divided(model, 4), work, mesh, micro_batches=8)
    assert {"layers", "stages", "reduce", "compute"} <= set(timeline.busy)
    assert sum(timeline.parts.values()) == pytest.approx(timeline.step_s)
    assert timeline.tokens == 2 * 8 * SEQUENCE / 16


def test_what_cannot_be_is_refused(model: ModelShape, work: Workload):
    with pytest.raises(ConfigError, match="whose layers are divided over them"):
        timed(model, work, MeshShape(1, 1, tensor=4))
    with pytest.raises(ConfigError, match="a block for each stage"):
        timed(model, work, MeshShape(1, 1, pipe=16))
