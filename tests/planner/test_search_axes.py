"""The search along tensor, sequence and pipeline ranks: what it finds is what the engine predicts there."""

from __future__ import annotations

import dataclasses
import functools

import pytest
import torch

import npuzero
from npuzero import parallel
from npuzero.comm import World, run_threads
from npuzero.config import Settings
from npuzero.errors import ConfigError
from npuzero.parallel.pipeline_parallel.schedule import schedule
from npuzero.plan import PIPE, Memory, MeshShape, Plan
from npuzero.planner import Cluster, ModelShape, TrainingJob, from_size
from npuzero.planner.advice import advise, advise_on, format_program, plan_name
from npuzero.planner.model_work.axes import divide_model_shape
from npuzero.planner.model_work.stages import StagedModel
from npuzero.planner.search import Choices, choices_over_axes, find_first_fit, list_mesh_shapes, search_runs
from npuzero.planner.timing.estimate import Estimate, Estimator

from .test_search import search_cluster

SEQUENCE = 512
#: GiB in which a stage trains, but not with half of them for its states.
TIGHT = 0.5
AXES = Choices(
    presets=("zero1", "zero3"), tensor=(1, 2), sequence=(1, 2), pipe=(1, 2), micro_batches=(2,), recompute=(False,)
)


@functools.cache
def search_axes_model() -> ModelShape:
    return from_size(60_000_000, 6, ranks=4)


def search_axes_job(on: Cluster | None = None, sequence: int = SEQUENCE) -> TrainingJob:
    return TrainingJob(search_axes_model(), on or search_cluster(), sequence, 64 * SEQUENCE)


@functools.cache
def search_every() -> tuple[Estimate, ...]:
    return search_runs(search_axes_job(), AXES, every=True).fitting


def test_each_size_of_each_axis_is_looked_at_beside_each_other():
    meshes = {(e.run.mesh.tensor, e.run.mesh.sequence, e.run.mesh.pipe) for e in search_every()}
    assert meshes == {(t, q, p) for t in (1, 2) for q in (1, 2) for p in (1, 2)}
    for each in search_every():
        assert each.run.mesh.world == 8
        assert each.tokens == 64 * SEQUENCE
        own = each.run.micro_batch * each.run.micro_batches
        assert own * each.run.mesh.data == 64 * each.run.mesh.sequence, "ranks that share a sequence have it once"
        assert each.axes() == {k: n for k in ("pipe", "tensor", "sequence") if (n := getattr(each.run.mesh, k)) > 1}


def test_what_it_says_of_a_rank_is_what_predict_says():
    """Of the divided model, and of each stage of a pipeline, with what the schedule sends."""
    for each in search_every():
        run = each.run
        own = divide_model_shape(search_axes_model(), run.mesh.tensor)
        if run.mesh.pipe == 1:
            said = own.predict(run.plan, run.mesh, Settings(), micro_batches=run.micro_batches, clip=True)
            assert each.report.held == said.held and each.report.bytes_sent == said.bytes_sent
            continue
        staged = StagedModel.of(own, run.mesh.pipe, tensor=run.mesh.tensor)
        edge = staged.edge_bytes(run.micro_batch * SEQUENCE // run.mesh.sequence, run.plan.precision)
        table = schedule("1f1b", run.mesh.pipe, run.micro_batches)
        for rank, said in staged.reports(run.plan, run.mesh, Settings(), table, True, edge).items():
            assert each.reports[rank].held == said.held
            assert each.memory["device"] >= said.memory[Memory.DEVICE.value]


def test_what_fits_does_and_nothing_faster_is_passed_over():
    quick = search_runs(search_axes_job(), AXES)
    assert quick.fitting[0].run == search_every()[0].run
    assert quick.timed < len(search_every())
    estimators = {}
    for each in search_every():
        estimator = estimators.setdefault(each.job.model, Estimator(each.job))
        assert estimator.least_s(each.run) <= each.step_s * (1 + 1e-9)
        assert estimator.least_bytes(each) <= each.memory["device"]
        assert not any(each.over(AXES.spare).values())


@pytest.mark.parametrize("memory", [0.15, 0.25, 0.4])
def test_whether_a_run_fits_is_what_its_memory_says(memory: float):
    on = search_cluster(memory=memory)
    for mesh, asked in list_mesh_shapes(search_axes_job(on), AXES):
        estimator = Estimator(asked)
        for each in search_every():
            if each.run.mesh == mesh:
                exact = estimator.estimate(each.run).memory["device"]
                assert estimator.fits(estimator.estimate(each.run), 0.0) == (exact <= on.device.memory_bytes)


def test_a_pipeline_keeps_parameters_unsharded_where_it_would():
    """And says so of the plan that it was asked for: npuzero.pipeline finds out by itself."""
    kept = [each for each in search_every() if each.run.mesh.pipe > 1 and each.run.plan.name == "zero3"]
    assert kept and all(each.run.plan.held_between.axes == () for each in kept)
    assert all(each.arguments() == {"plan": "zero3", "precision": "bf16"} for each in kept)
    tight = search_runs(search_axes_job(search_cluster(memory=TIGHT)), dataclasses.replace(AXES, pipe=(2,)), every=True)
    sharded = [each for each in tight.fitting if each.run.plan.name == "zero3"]
    assert sharded and any(each.run.plan.held_between.axes for each in sharded)


def test_the_program_trains_as_it_was_foretold():
    """The calls of an answer, run: ranks hold what the answer says, activations apart."""
    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 4}
    config = {"model_type": "llama", "num_attention_heads": 4, **sizes}
    transformers = pytest.importorskip("transformers")
    choices = Choices(presets=("zero2",), tensor=(2,), pipe=(2,), micro_batches=(1,), precisions=("fp32",))
    advice = advise(config, "4xa100-80g", seq=16, tokens_per_step=64, choices=choices)
    best = advice.best
    assert "npuzero.mesh(pipe=2, tensor=2)" in format_program(best) and format_program(best) in str(advice)

    def rank(world: World) -> tuple[int, dict[str, int]]:
        torch.manual_seed(0)
        net = transformers.LlamaForCausalLM(transformers.LlamaConfig(num_attention_heads=4, **sizes))
        mesh = npuzero.mesh(world=world, **best.axes())
        parallel.tensor(net, mesh)
        pipe = npuzero.pipeline(net, mesh, micro_batches=best.run.micro_batches, **best.arguments())
        optimizer = npuzero.AdamW(pipe.parameters())
        tokens = torch.arange(best.run.micro_batches * 16).view(-1, 16) % 64  # the same on the ranks of one pipeline
        for _ in range(2):
            pipe.step(input_ids=tokens, labels=tokens)
            npuzero.clip_grad_norm_(pipe, 1.0)
            optimizer.step()
            optimizer.zero_grad()
        return mesh.index((PIPE,)), npuzero.report(pipe).bytes_held

    for index, held in run_threads(4, rank):
        assert held == best.reports[index].bytes_held


def test_sequences_get_the_preset_that_is_for_them():
    found = search_runs(
        search_axes_job(), Choices(sequence=(2,), recompute=(False,), micro_batches=(1,)), every=True
    ).fitting
    assert "isp" in {each.run.plan.name for each in found}
    assert "isp" not in {each.run.plan.name for each in search_every()}, "where others were asked for"


def test_longer_sequences_than_fit_get_more_ranks_each_as_a_way_out():
    long = dataclasses.replace(
        search_axes_job(search_cluster(memory=1.3), 16 * SEQUENCE), tokens_per_step=64 * 16 * SEQUENCE
    )
    choices = Choices(presets=("zero3",), micro_batches=(1,))
    assert find_first_fit(long, choices) is None
    advice = advise_on(long, choices)
    assert not advice.fits
    ways = {way.what: way.estimate for way in advice.ways_out}
    sizes = [size for size in (2, 4) if f"{size} ranks for each sequence" in ways]
    assert len(sizes) == 1
    assert ways[f"{sizes[0]} ranks for each sequence"].run.mesh.sequence == sizes[0]


def test_all_axes_are_all_powers_of_two_within_a_node_and_over_all():
    wide = choices_over_axes(search_cluster(), Choices())
    assert (wide.tensor, wide.sequence, wide.pipe) == ((1, 2, 4), (1, 2, 4), (1, 2, 4, 8))
    asked = advise(search_axes_model(), search_cluster(), seq=SEQUENCE, tokens_per_step=64 * SEQUENCE, axes=True)
    assert asked.choices.pipe == wide.pipe
    assert asked.best.step_s <= search_every()[0].step_s
    assert len({plan_name(each) for each in asked.found.fitting}) > 3


@pytest.mark.parametrize(
    ("choices", "words"),
    [
        (Choices(tensor=(3,)), "mesh: tensor: expected a positive divisor of the 8 ranks"),
        (Choices(tensor=(8,)), "heads"),
        (Choices(pipe=(16,)), "mesh: pipe"),
        (Choices(sequence=(8,)), "expected heads that the 8 ranks of the sequence axis divide"),
        (Choices(pipe=(8,)), "over 8 stages"),
    ],
)
def test_what_cannot_be_is_refused_and_passed_over_beside_what_can(choices: Choices, words: str):
    with pytest.raises(ConfigError) as refused:
        search_runs(search_axes_job(), choices)
    assert words in str(refused.value)
    sizes = {axis: (1, *getattr(choices, axis)) for axis in ("tensor", "sequence", "pipe")}
    beside = dataclasses.replace(choices, presets=("zero1",), micro_batches=(1,), **sizes)
    assert {each.axes() == {} for each in search_runs(search_axes_job(), beside).fitting} == {True}


def test_groups_that_an_arrangement_has_not_are_passed_over():
    """Four ranks of a group, of which two tensor ranks leave four data ranks on two nodes, and four of them two."""
    choices = Choices(presets=("hsdp",), local_sizes=(4,), tensor=(1, 2, 4), micro_batches=(1,), recompute=(False,))
    assert [mesh.tensor for mesh, _ in list_mesh_shapes(search_axes_job(), choices)] == [1, 2]


def test_sequences_that_ranks_cannot_slice_are_refused():
    with pytest.raises(ConfigError, match="seq: expected a multiple of 2"):
        search_runs(TrainingJob(search_axes_model(), search_cluster(), 511, None), Choices(sequence=(2,)))
    with pytest.raises(ConfigError, match="seq: expected a multiple of 4"):
        search_runs(
            TrainingJob(search_axes_model(), search_cluster(), 514, None),
            Choices(tensor=(2,), sequence=(2,), mode="msp"),
        )


def test_a_mesh_of_pods_has_the_ranks_of_the_cluster():
    (mesh, asked), *_ = list_mesh_shapes(search_axes_job(), Choices(tensor=(2,)))
    assert mesh == MeshShape(2, 2, tensor=2)
    assert asked.model.mode == "mtp" and asked.cluster == search_cluster()
    assert {each for each in asked.model.units[1] if each.cut} != set()
    assert Plan.preset("zero1").mesh_shape(mesh) == mesh
