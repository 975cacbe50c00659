"""The clock: its properties, its arithmetic by hand, and the trace that it writes."""

from __future__ import annotations

import dataclasses
import itertools
import json
import time
from collections import defaultdict

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from npuzero.config import Settings
from npuzero.errors import ConfigError
from npuzero.plan import MeshShape, Plan
from npuzero.planner import Cluster, ModelShape, TrainingJob, TrainingRun, from_size
from npuzero.planner.hardware.cluster import DeviceSpec, LinkSpec
from npuzero.planner.model_work.units import ModelWorkload, UnitWork
from npuzero.planner.timing.clock import StepClock, step_time
from npuzero.shard.build import ParameterFacts

WIDTH, BLOCKS, TOKENS = 1024, 6, 2048
PRESETS = ("zero0", "zero1", "zero1.5", "zero2", "zero3", "hpz", "hsdp", "zero++", "offload", "infinity", "delayed")


def two_node_cluster(**numbers: float) -> Cluster:
    """Two nodes of four made-up devices, slow enough that every link matters."""
    rates = {"flops": 1e14, "memory": 1e12, "local": 1e11, "node": 1e10, "host": 1e10, "disk": 2e9, **numbers}
    links = {
        "local": LinkSpec(rates["local"], 5e-6),
        "node": LinkSpec(rates["node"], 1e-5),
        "host": LinkSpec(rates["host"], 1e-5),
        "disk_read": LinkSpec(rates["disk"], 1e-4),
        "disk_write": LinkSpec(rates["disk"], 1e-4),
    }
    device = DeviceSpec({"bf16": rates["flops"], "fp32": rates["flops"] / 8}, 0.5, 64 * 2**30, rates["memory"])
    return Cluster("made up", device, links, 4, 8)


def decoder_shape(blocks: int = BLOCKS, width: int = WIDTH) -> ModelShape:
    root = [ParameterFacts("embed", torch.Size([8000, width])), ParameterFacts("head", torch.Size([8000, width]))]
    block = [ParameterFacts(f"{i}.weight", torch.Size([4 * width, width])) for i in range(3)]
    return ModelShape("decoder", [root, *([block] * blocks)])


def decoder_workload(shape: ModelShape, tokens: int = TOKENS) -> ModelWorkload:
    def unit(parameters: list[ParameterFacts]) -> UnitWork:
        numel = sum(parameter.shape.numel() for parameter in parameters)
        return UnitWork(2.0 * numel * tokens, 40 * WIDTH * tokens, 60 * WIDTH * tokens, 0, 0, 0, 20)

    return ModelWorkload(tuple(map(unit, shape.units)), 1, tokens)


def time_decoder_step(preset: str, on: Cluster, mesh: MeshShape | None = None, **facts: object):
    shape = decoder_shape()
    run = TrainingRun(Plan.preset(preset, precision="bf16"), mesh or MeshShape(2, 4), **facts)
    return step_time(TrainingJob(shape, on, TOKENS), run, decoder_workload(shape))


@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize("micro_batches", [1, 2, 7])
def test_the_parts_are_the_step_and_no_lane_is_busier_than_it(preset, micro_batches):
    timeline = time_decoder_step(preset, two_node_cluster(), micro_batches=micro_batches)
    assert sum(timeline.parts.values()) == pytest.approx(timeline.step_s, rel=1e-9)
    assert max(timeline.busy.values()) <= timeline.step_s * (1 + 1e-9)
    assert timeline.busy["compute"] > 0


@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize("overlap", [True, False])
def test_lanes_never_overlap_themselves(preset, overlap):
    timeline = time_decoder_step(preset, two_node_cluster(), micro_batches=4, settings=Settings(overlap=overlap))
    lanes = defaultdict(list)
    for span in timeline.spans:
        # What compute waits for is in its lane, too.
        lanes["compute" if span.category.startswith("wait") else span.category].append((span.begin_s, span.end_s))
    for lane, spans in lanes.items():
        ends = sorted(spans)
        for (_, end), (begin, _) in itertools.pairwise(ends):
            assert begin >= end - 1e-9, lane
    last = max(end for _, end in lanes["compute"])
    assert last == pytest.approx(timeline.step_s, rel=1e-6), "written out, as many micro-batches take as long"


@settings(max_examples=25, deadline=None)
@given(
    preset=st.sampled_from(PRESETS),
    micro_batches=st.integers(1, 6),
    recompute=st.booleans(),
    overlap=st.booleans(),
    what=st.sampled_from(["flops", "memory", "local", "node", "host", "disk"]),
    slow=st.floats(0.1, 10),
    faster=st.floats(1.01, 50),
)
def test_nothing_faster_makes_a_step_slower(preset, micro_batches, recompute, overlap, what, slow, faster):
    usual = {"flops": 1e14, "memory": 1e12, "local": 1e11, "node": 1e10, "host": 1e10, "disk": 2e9}[what]
    facts = {"micro_batches": micro_batches, "recompute": recompute, "settings": Settings(overlap=overlap)}
    before = time_decoder_step(preset, two_node_cluster(**{what: slow * usual}), **facts)
    after = time_decoder_step(preset, two_node_cluster(**{what: slow * usual * faster}), **facts)
    assert after.step_s <= before.step_s * (1 + 1e-9)


@pytest.mark.parametrize("preset", ["zero0", "zero2", "zero3", "zero++"])
def test_a_world_of_one_sends_nothing(preset):
    timeline = time_decoder_step(preset, two_node_cluster(), MeshShape(1, 1), micro_batches=3)
    assert set(timeline.busy) == {"compute"}
    assert not [part for part in timeline.parts if part.startswith("wait")]
    assert timeline.parts["contention"] == 0


def test_compute_alone_is_its_arithmetic():
    """One rank, two passes with recomputation: FLOPs over the sustained peak, bytes over memory."""
    on, shape = two_node_cluster(), decoder_shape()
    timeline = time_decoder_step("zero0", on, MeshShape(1, 1), micro_batches=2, recompute=True)
    counted, passes = decoder_workload(shape), 2
    blocks = counted.units[1:]
    products = passes * 3 * sum(unit.flops for unit in counted.units) / 0.5e14
    again = passes * sum(unit.flops / 0.5e14 + unit.forward_bytes / 1e12 for unit in blocks)
    numel = sum(parameter.shape.numel() for unit in shape.units for parameter in unit)
    assert timeline.parts["products"] == pytest.approx(products)
    assert timeline.parts["recomputation"] == pytest.approx(again)
    # Gradient twice (with the norm), master and two moments each way, and the bf16 parameter.
    assert timeline.parts["update"] == pytest.approx(numel * (8 + 24 + 2) / 1e12, rel=1e-3)
    assert timeline.bound == "compute"
    assert timeline.tokens_per_s == pytest.approx(passes * TOKENS / timeline.step_s)


def test_without_overlap_collectives_add_up():
    apart = time_decoder_step("zero3", two_node_cluster(), settings=Settings(overlap=False))
    sent = sum(seconds for lane, seconds in apart.busy.items() if lane != "compute")
    assert apart.parts["contention"] == pytest.approx(0, abs=1e-12)
    assert apart.step_s == pytest.approx(apart.busy["compute"] + sent, rel=1e-9)
    assert time_decoder_step("zero3", two_node_cluster()).step_s < apart.step_s


@pytest.mark.parametrize(
    ("numbers", "preset", "bound"),
    [
        ({"node": 1e8}, "zero3", "node link"),
        ({"memory": 1e9}, "zero3", "memory"),
        ({"local": 1e7, "node": 1e12}, "zero1.5", "node link"),
        ({"host": 1e8}, "offload", "host link"),
        ({"disk": 1e7}, "infinity", "disk"),
        ({"flops": 1e10}, "zero3", "compute"),
    ],
)
def test_a_step_is_bound_by_what_is_slow(numbers, preset, bound):
    if preset == "zero1.5":  # a node that is no faster than its links: the ring's wires within nodes bound it
        timeline = time_decoder_step(preset, two_node_cluster(**numbers), MeshShape(1, 4))
        assert timeline.bound == "local link"
        return
    assert time_decoder_step(preset, two_node_cluster(**numbers)).bound == bound


def test_many_micro_batches_are_each_played():
    """What is like what was before is not played again; it takes as long as if it were."""
    for preset in ("zero1", "zero3", "offload"):
        few, more, most = (time_decoder_step(preset, two_node_cluster(), micro_batches=n).step_s for n in (20, 21, 60))
        assert most - more == pytest.approx(39 * (more - few), rel=1e-6)


def test_a_trace_has_the_form_of_a_runs_own(tmp_path):
    timeline = time_decoder_step("zero3", two_node_cluster(), micro_batches=2)
    timeline.write_trace(tmp_path / "step.json")
    events = json.loads((tmp_path / "step.json").read_text("utf-8"))["traceEvents"]
    spans = [event for event in events if event["ph"] == "X"]
    assert {"comm gather", "comm reduce", "comm control", "wait for gather"} <= {event["cat"] for event in spans}
    assert {"forward blocks.0", "backward blocks.5"} <= {event["name"] for event in spans}
    assert len(spans) == len(timeline.spans)


def test_a_steps_time_is_there_at_once():
    shape = from_size(7 * 10**9)
    counted = decoder_workload(shape)
    clock = StepClock(TrainingJob(shape, two_node_cluster(), TOKENS))
    for preset in ("zero1", "zero3"):
        run = TrainingRun(Plan.preset(preset, precision="bf16"), MeshShape(2, 4), micro_batches=16)
        clock.time(run, counted)
        begin = time.process_time()
        for count in (16, 17, 18, 19):
            clock.time(dataclasses.replace(run, micro_batches=count), counted)
        assert (time.process_time() - begin) / 4 < 0.025  # 5 ms where nothing else runs


def test_work_of_another_model_is_refused():
    shape = decoder_shape()
    job = TrainingJob(shape, two_node_cluster(), TOKENS)
    with pytest.raises(ConfigError, match="7 units"):
        step_time(job, TrainingRun(Plan.preset("zero3"), MeshShape(2, 4)), decoder_workload(decoder_shape(blocks=2)))
