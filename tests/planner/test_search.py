"""The search: what fits is what the engine runs, nothing faster is left out, and more of anything never harms."""

from __future__ import annotations

import dataclasses
import functools
import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from npuzero.config import Settings
from npuzero.errors import ConfigError
from npuzero.plan import OFFLOADED, PRECISIONS, PRESETS, THINNED, Memory, MeshShape, Plan
from npuzero.planner import Cluster, TrainingJob, TrainingRun, from_size
from npuzero.planner.hardware.cluster import DeviceSpec, LinkSpec
from npuzero.planner.model_work.units import measure_workload
from npuzero.planner.search import (
    Choices,
    find_first_fit,
    list_micro_batches,
    list_plan_placements,
    search_runs,
    state_bytes,
)
from npuzero.planner.timing.clock import step_time
from npuzero.planner.timing.estimate import Estimator, memory_limits
from npuzero.planner.timing.memory import estimate_memory

SEQUENCE = 512
GIB = 2**30


@functools.cache
def search_model():
    return from_size(60_000_000, 6)


def search_cluster(ranks: int = 8, node: int = 4, memory: float = 2.0, **rates: float) -> Cluster:
    """Nodes of made-up devices, slow enough that every link matters."""
    per_s = {"flops": 1e13, "hbm": 4e11, "local link": 2e10, "node link": 2e9, "host": 1e10, "disk": 2e9, **rates}
    links = {
        "local": LinkSpec(per_s["local link"], 5e-6),
        "node": LinkSpec(per_s["node link"], 1e-5),
        "host": LinkSpec(per_s["host"], 1e-5),
        "disk_read": LinkSpec(per_s["disk"], 1e-4),
        "disk_write": LinkSpec(per_s["disk"], 1e-4),
    }
    device = DeviceSpec({"bf16": per_s["flops"], "fp32": per_s["flops"] / 8}, 0.5, int(memory * GIB), per_s["hbm"])
    return Cluster("made up", device, links, node, ranks, host_memory_bytes=16 * GIB)


def search_job(tokens: int | None = 64 * SEQUENCE, on: Cluster | None = None) -> TrainingJob:
    return TrainingJob(search_model(), on or search_cluster(), SEQUENCE, tokens)


def search_facts(found):
    """What a search found, comparable."""
    return [(each.run, each.step_s) for each in found.fitting], [each.run for each in found.misfits]


EVERYTHING = Choices(presets=(*PRESETS, *OFFLOADED, *THINNED))


def test_what_fits_is_what_predict_says_and_is_within_each_memory():
    found = search_runs(search_job(), EVERYTHING, every=True)
    assert {each.run.plan.name for each in found.fitting} >= {"zero3", "hpz", "hsdp", "offload", "infinity", "thin"}
    for each in found.fitting:
        run, limit = each.run, memory_limits(each.job.cluster, EVERYTHING.spare)
        predicted = search_model().predict(run.plan, run.mesh, Settings(), micro_batches=run.micro_batches, clip=True)
        assert dataclasses.replace(each.report, plan=predicted.plan) == predicted
        assert all(each.memory[memory] <= most for memory, most in limit.items())
        assert each.memory == estimate_memory(each.job, run, predicted, each.work)
        assert each.tokens == 64 * SEQUENCE
        assert each.tokens_per_s == pytest.approx(each.timeline.tokens_per_s)


def test_what_does_not_fit_does_not():
    found = search_runs(search_job(on=search_cluster(memory=0.45)), EVERYTHING)
    assert found.fitting
    assert found.misfits
    for each in found.misfits:
        assert any(each.over(EVERYTHING.spare).values())
        assert each.run.micro_batch == 1 or not each.run.micro_batch % 2
    fits = {(each.run.plan, each.run.mesh, each.run.recompute) for each in (*found.fitting, *found.slower)}
    assert not fits & {(each.run.plan, each.run.mesh, each.run.recompute) for each in found.misfits}


@pytest.mark.parametrize("memory", [0.4, 0.5, 0.7, 1.0])
def test_whether_a_run_fits_is_decided_as_by_walking_through_its_step(memory):
    """By bounds, most of the time: they never say otherwise."""
    on = search_cluster(memory=memory)
    estimator = Estimator(search_job(on=on))
    for preset, recompute, (size, count) in itertools.product(
        ("zero0", "zero2", "zero3", "offload"), (False, True), [(1, 8), (2, 4), (8, 1)]
    ):
        plan = Plan.preset(preset, precision="bf16")
        each = estimator.estimate(TrainingRun(plan, MeshShape(2, 4), size, count, recompute))
        exact = estimate_memory(each.job, each.run, each.report, each.work)
        assert estimator.fits(each, 0.0) == (exact["device"] <= on.device.memory_bytes and exact["host"] <= 16 * GIB)
        assert estimator.least_bytes(each) <= exact["device"]


@pytest.mark.parametrize("sequences", [3, 8])
def test_work_of_many_sequences_follows_from_that_of_two(sequences):
    run = TrainingRun(Plan.preset(0, precision="bf16"), MeshShape(2, 4), sequences)
    got = Estimator(search_job()).estimate(run).work
    counted = measure_workload(search_model(), SEQUENCE, sequences)
    assert (got.micro_batch, got.sequence) == (sequences, SEQUENCE)
    for mine, true in zip(got.units, counted.units, strict=True):
        assert dataclasses.astuple(mine) == pytest.approx(dataclasses.astuple(true), rel=1e-3)
    for mine, true in zip((*got.kept, *got.recomputed), (*counted.kept, *counted.recomputed), strict=True):
        assert (mine.unit, mine.backward) == (true.unit, true.backward)
        assert mine.peak_bytes == pytest.approx(true.peak_bytes, rel=1e-2)


def test_nothing_faster_is_passed_over():
    every, quick = search_runs(search_job(), every=True), search_runs(search_job())
    assert not every.slower
    assert quick.slower
    assert quick.fitting[0].run == every.fitting[0].run
    assert quick.timed < every.timed
    times = {each.run: each.step_s / each.tokens for each in every.fitting}
    best = quick.fitting[0].step_s / quick.fitting[0].tokens
    estimator = Estimator(search_job())
    for each in quick.slower:
        assert estimator.least_s(each.run) / each.tokens >= best
    assert min(times.values()) == best
    for each in every.fitting:
        assert estimator.least_s(each.run) <= each.step_s


def test_runs_are_timed_by_the_clock_and_only_those_that_fit():
    small = search_job(on=search_cluster(memory=0.45))
    found = search_runs(small, every=True)
    assert found.timed <= 3 * len(found.fitting), "from the largest micro-batch down, and no further than it pays"
    for each in found.fitting:
        assert each.step_s == step_time(small, each.run, each.work).step_s
    assert all(each.timeline is None for each in found.misfits)


def test_plans_that_come_to_the_same_are_looked_at_once():
    one_node = [plan.name for plan, _ in list_plan_placements(search_job(on=search_cluster(4, 4)), Choices())]
    assert one_node == ["zero0", "zero1", "zero2", "zero3", "zero3-keep"], "within a host is over all ranks"
    assert [plan.name for plan, _ in list_plan_placements(search_job(on=search_cluster(1, 1)), Choices())] == ["zero0"]
    two = [
        plan.name
        for plan, _ in list_plan_placements(search_job(), dataclasses.replace(Choices(), presets=(*PRESETS, *THINNED)))
    ]
    assert two == [name for name in (*PRESETS, *THINNED) if name != "mics"]


def test_groups_of_several_nodes_are_looked_at():
    found = [
        (plan.name, plan.local_size)
        for plan, _ in list_plan_placements(search_job(on=search_cluster(32, 4)), Choices(presets=("hsdp",)))
    ]
    assert found == [("hsdp", None), ("hsdp", 8), ("hsdp", 16)]


def test_parts_off_the_device_are_looked_at_as_zero_takes_them():
    choices = Choices(presets=("zero0", "zero1", "zero3"), offloads=(None, "host", "nvme+parameters"))
    names = [plan.name for plan, _ in list_plan_placements(search_job(), choices)]
    expected = {"zero0", "zero1", "zero3", "zero0+host", "zero1+host", "zero3+host"}
    assert set(names) == expected | {"zero0+nvme+parameters", "zero3+nvme+parameters"}


def test_every_plan_is_one_that_zero_takes():
    choices = dataclasses.replace(EVERYTHING, offloads=(None, "host"), precisions=tuple(PRECISIONS))
    estimator = Estimator(search_job())
    plans = list_plan_placements(search_job(on=search_cluster(32, 4)), choices)
    assert len(plans) > 100
    for plan, mesh in plans:
        named = estimator.estimate(TrainingRun(plan, mesh)).arguments()
        offload = named.pop("offload", None)
        made = Plan.preset(named.pop("plan"), **named)
        assert (made if offload is None else made.offloaded(offload)) == plan


def test_a_plan_of_ones_own_and_settings_are_handed_on():
    plan = dataclasses.replace(Plan.preset("zero3", precision="bf16"), name="mine", between=Plan().parameters)
    run = TrainingRun(plan, MeshShape(2, 4), settings=Settings(prefetch=3))
    assert Estimator(search_job()).estimate(run).arguments() == {"plan": plan, "settings": Settings(prefetch=3)}


@pytest.mark.parametrize(
    ("tokens", "expected"),
    [
        (2**19, [(1, 16), (2, 8), (4, 4), (8, 2), (16, 1)]),
        (500_000, [(1, 16), (2, 8), (4, 4), (8, 2), (16, 1)]),
        (8 * 4096, [(1, 1)]),
        (12 * 8 * 4096, [(1, 12), (2, 6), (4, 3)]),
        (None, [(2**power, 1) for power in range(11)]),
    ],
)
def test_micro_batches_have_the_tokens_of_a_step(tokens, expected):
    asked = TrainingJob(search_model(), search_cluster(), 4096, tokens)
    assert list_micro_batches(asked, MeshShape(2, 4)) == expected


def test_micro_batches_that_are_asked_for():
    assert list_micro_batches(TrainingJob(search_model(), search_cluster(), 4096, 2**19), MeshShape(2, 4), (4, 2)) == [
        (2, 8),
        (4, 4),
    ]


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (
            lambda: search_runs(search_job(tokens=3 * SEQUENCE)),
            "tokens_per_step: expected micro-batches of 1 sequence or more",
        ),
        (
            lambda: search_runs(search_job(), Choices(micro_batches=(64,))),
            "micro-batches of 64 sequences for each of 8 ranks",
        ),
        (
            lambda: search_runs(search_job(on=search_cluster(7, 7)), Choices(presets=("hsdp",), local_sizes=(2,))),
            "divides the world of 7",
        ),
        (lambda: search_runs(search_job(), Choices(presets=("zero4",))), "Did you mean 'zero"),
        (lambda: search_runs(search_job(), Choices(precisions=("bf17",))), "Did you mean 'bf16'"),
        (lambda: search_runs(search_job(), Choices(offloads=("hots",))), "Did you mean 'host'"),
    ],
)
def test_what_cannot_be_is_refused(make, words):
    with pytest.raises(ConfigError) as refused:
        make()
    assert words in str(refused.value)


def test_it_says_the_same_each_time():
    assert search_facts(search_runs(search_job())) == search_facts(search_runs(search_job()))


def test_no_end_of_memory_of_the_host_is_passed():
    tight = dataclasses.replace(search_cluster(memory=0.6), host_memory_bytes=10 * 2**20)
    assert not search_runs(search_job(on=tight), Choices(presets=("offload", "offload3"))).fitting
    roomy = search_cluster(memory=0.6)
    found = search_runs(search_job(on=roomy), Choices(presets=("offload", "offload3")))
    assert found.fitting[0].memory[Memory.HOST.value] > 10 * 2**20


def test_the_first_fit_is_the_first_of_the_table():
    fit = find_first_fit(search_job(on=search_cluster(memory=0.45)), Choices())
    found = search_runs(search_job(on=search_cluster(memory=0.45)), every=True)
    names = {each.run.plan.name for each in found.fitting}
    assert fit is not None
    assert fit.run.plan.name == next(name for name in PRESETS if name in names)
    assert find_first_fit(search_job(on=search_cluster(memory=0.01)), Choices()) is None


def test_a_whole_state_has_18_bytes_a_parameter_in_bf16():
    padded = search_model().parameters
    assert state_bytes(search_model(), "bf16") == pytest.approx(18 * padded, rel=1e-3)
    assert state_bytes(search_model(), "fp32") == pytest.approx(16 * padded, rel=1e-3)
    assert state_bytes(search_model(), "bf16-8bit") == pytest.approx(10.03 * padded, rel=1e-3)


@settings(deadline=None, max_examples=12)
@given(
    memory=st.floats(0.35, 1.5),
    which=st.sampled_from(["memory", "flops", "local link", "node link", "host", "disk", "hbm"]),
    times=st.floats(1.0, 3.0),
)
def test_more_of_anything_never_harms(memory, which, times):
    base = {"flops": 1e13, "hbm": 4e11, "local link": 2e10, "node link": 2e9, "host": 1e10, "disk": 2e9}
    choices = Choices(presets=("zero1", "zero2", "zero3", "hsdp", "offload3", "infinity"))
    more = {**base, which: base[which] * times} if which in base else base
    before = search_runs(search_job(on=search_cluster(memory=memory, **base)), choices)
    after = search_runs(search_job(on=search_cluster(memory=memory * (1 if which in base else times), **more)), choices)
    assert len(after.misfits) <= len(before.misfits)
    if before.fitting:
        assert after.fitting[0].step_s <= before.fitting[0].step_s * (1 + 1e-9)
