"""A pipeline trains as one process does, under any schedule, plan and number of ranks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import npuzero
from npuzero import MeshShape, Placement, Plan, Settings, StateError, comm
from npuzero.comm import World
from npuzero.plan import THINNED
from world.toy import build_seeded_model

from .pipeline_training import (
    ROWS,
    WIDTH,
    DeepModel,
    PipelineBlock,
    PipelineRun,
    assert_like_plain,
    pipeline_loss,
    relative_distance,
    train_pipeline,
    train_pipeline_plain,
)

SGD = PipelineRun()
ADAM = PipelineRun(kind="adamw")
STAGES = [0, 1, 2, 3]
#: Schedules by name, with the stages of each rank.
SCHEDULES = [("gpipe", 1), ("1f1b", 1), ("interleaved", 2), ("interleaved", 4), ("zero-bubble", 1)]


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize(("schedule", "chunks"), SCHEDULES)
def test_two_ranks_train_as_one_process_does(schedule: str, chunks: int, stage: int):
    found = train_pipeline(SGD, 2, stage, schedule=schedule, chunks=chunks)
    assert_like_plain(SGD, found, 1e-6)
    assert [each.pipe.peak for each in found] == [each.pipe.schedule.peak(each.rank) for each in found]


@pytest.mark.parametrize("stage", [1, 3])
@pytest.mark.parametrize("tied", [False, True], ids=["apart", "tied"])
def test_parts_are_clipped_over_all_stages(tied: bool, stage: int):
    run = replace(SGD, clip=0.1, parts=True, data=2, make=partial(DeepModel, 4, tied=tied))
    assert_like_plain(run, train_pipeline(run, 2, stage), 1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["sgd", "adamw"])
@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("micro_batches", [1, 2, 3, 4, 6, 8])
@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.parametrize(("schedule", "chunks"), SCHEDULES)
def test_grid(schedule: str, chunks: int, ranks: int, micro_batches: int, stage: int, kind: str):
    run = PipelineRun(micro_batches, data=1 if ranks > 2 else 2, kind=kind, clip=0.5)
    if chunks > 1 and micro_batches % ranks:
        with pytest.raises(npuzero.ConfigError, match="micro-batches"):
            train_pipeline(run, ranks, stage, schedule=schedule, chunks=chunks)
        return
    found = train_pipeline(run, ranks, stage, schedule=schedule, chunks=chunks)
    assert_like_plain(run, found, 1e-6 if kind == "sgd" else 1e-4)
    for each in found:
        assert each.pipe.peak == each.pipe.schedule.peak(each.rank // run.data)


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "interleaved"])
def test_every_bit_is_that_of_one_process(schedule: str):
    """Each rank accumulates micro-batches in order, as one process does."""
    for stage in (2, 3):
        found = train_pipeline(SGD, 2, stage, schedule=schedule, chunks=2 if schedule == "interleaved" else 1)
        assert_like_plain(SGD, found, 0.0)


@pytest.mark.parametrize("precision", ["bf16", "bf16-split"])
def test_low_precision_has_the_bits_of_one_rank(precision: str):
    """Activations are sent without conversion, so a stage computes the same bits as in one process."""

    def alone(world: World) -> dict[str, Tensor]:
        model = npuzero.zero(build_seeded_model(make=DeepModel), stage=2, precision=precision, world=world)
        optimizer = ADAM.optimizer(model.parameters(), plain=False)
        for step in range(ADAM.steps):
            parts = (part.chunk(ADAM.micro_batches) for part in ADAM.batch(step, 0))
            for tokens, target in zip(*parts, strict=True):
                (pipeline_loss(model(tokens), target) / ADAM.micro_batches).backward()
            optimizer.step()
            optimizer.zero_grad()
        return npuzero.full_state_dict(model)

    (expected,) = comm.run_threads(1, alone)
    for each in train_pipeline(ADAM, 2, 2, precision=precision):
        assert all(torch.equal(value, expected[name]) for name, value in each.state.items())


def test_overlap_moves_no_bit():
    settings = [Settings(overlap=overlap) for overlap in (True, False, "activations", "gradients")]
    first, *others = (train_pipeline(SGD, 2, 3, settings=each) for each in settings)
    for other in others:
        for mine, theirs in zip(first, other, strict=True):
            assert mine.losses == theirs.losses
            assert all(torch.equal(value, theirs.state[name]) for name, value in mine.state.items())


# --- what travels -----------------------------------------------------------------------------------------------------


def boundary_bytes(run: PipelineRun) -> int:
    """Return the bytes of a micro-batch's activations between blocks."""
    return ROWS * 5 * WIDTH * 4


@pytest.mark.parametrize(("schedule", "chunks"), SCHEDULES)
def test_each_edge_carries_activations_ahead_and_gradients_back(schedule: str, chunks: int):
    found = train_pipeline(SGD, 2, 2, schedule=schedule, chunks=chunks)
    edges = 2 * chunks - 1
    for each in found:
        ahead = sum(stage % 2 == each.rank for stage in range(edges))
        back = sum((stage + 1) % 2 == each.rank for stage in range(edges))
        assert each.report.bytes_sent["send"] == SGD.micro_batches * (ahead + back) * boundary_bytes(SGD)


class HeadOnly(DeepModel):
    """Freeze the first half; only the second half trains."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens.requires_grad_(False)
        self.blocks[:9].requires_grad_(False)


class AdaptedMiddle(DeepModel):
    """One block trains; the blocks before and after it are frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.requires_grad_(False)
        self.blocks[5].requires_grad_(True)


@pytest.mark.parametrize(("make", "gradients"), [(HeadOnly, 0), (AdaptedMiddle, 1)])
def test_no_gradient_crosses_an_edge_that_needs_none(make: Callable[[], nn.Module], gradients: int):
    run = replace(SGD, make=make, clip=0.1)
    found = train_pipeline(run, 2, 3, split=[8, 9])
    assert_like_plain(run, found, 1e-6)
    each = SGD.micro_batches * boundary_bytes(run)
    sent = [rank.report.bytes_sent.get("send", 0) for rank in found]
    assert sent == [each, gradients * each]


@pytest.mark.parametrize("between", [None, ()])
def test_parameters_are_gathered_once_a_step_or_twice_a_micro_batch(between: tuple[str, ...] | None):
    run = replace(SGD, data=2)
    plan = replace(Plan.preset("zero3"), between=None if between is None else Placement(between))
    sent = [each.report.bytes_sent["all_gather"] for each in train_pipeline(run, 2, plan)]
    once = [
        each.report.bytes_sent["all_gather"] for each in train_pipeline(run, 2, replace(plan, between=Placement(())))
    ]
    # The last unit of forward is the first in backward, and needs no all-gather in between.
    assert sent == once if between == () else all(a > 5 * b for a, b in zip(sent, once, strict=True))


def test_presets_keep_parameters_between_micro_batches():
    assert train_pipeline(SGD, 2, 3)[0].report.plan.between == Placement(())
    assert train_pipeline(SGD, 2, Plan.preset("zero3"))[0].report.plan.between is None


PRESETS = ["zero0", "zero1", "zero1.5", "zero2", "zero3", "zero3-keep", "hpz", "hsdp", "mics"]


@pytest.mark.checkered
@pytest.mark.parametrize("preset", [*PRESETS, *THINNED])
@pytest.mark.parametrize(("schedule", "chunks"), [("1f1b", 1), ("interleaved", 2)])
def test_a_rank_holds_and_sends_what_was_foretold(schedule: str, chunks: int, preset: str):
    run = PipelineRun(2, data=2, clip=1.0)
    for plan in (Plan.preset(preset), replace(Plan.preset(preset), between=Placement(()))):
        for each in train_pipeline(run, 2, plan, schedule=schedule, chunks=chunks):
            facts = {"clip": True, "moments": 0, "activation_bytes": boundary_bytes(run)}
            expected = npuzero.predict(each.pipe, plan, MeshShape(node=2, local=1, pipe=2), **facts)
            assert (each.report.bytes_sent, each.report.sent_along) == (expected.bytes_sent, expected.sent_along)
            assert each.report.held == expected.held


@pytest.mark.parametrize("preset", THINNED)
def test_thin_wires_come_near_plain_torch(preset: str):
    """Every stage's parameters and gradients are rounded in transit; values on edges between stages are not."""
    run = replace(SGD, data=2, clip=1.0)
    state, losses, norms = train_pipeline_plain(run)
    found = train_pipeline(run, 2, Plan.preset(preset), schedule="interleaved", chunks=2)
    for each in found:
        # Biases begin at zero, and are sums of rounded gradients.
        assert (
            0
            < relative_distance({name: each.state[name] for name in each.state if name.endswith("weight")}, state)
            <= 0.05
        )
        assert each.losses == pytest.approx(losses, rel=0.01) and each.norms == pytest.approx(norms, rel=0.05)
        assert (each.losses, each.norms) == (found[0].losses, found[0].norms)


# --- what programs do -------------------------------------------------------------------------------------------------


def on_two_ranks(
    body: Callable[[World, Any], Any], make: Callable[[], nn.Module] = DeepModel, **options: Any
) -> list[Any]:
    def rank(world: World) -> Any:
        model = build_seeded_model(make=make)
        given = {"loss_fn": pipeline_loss, "blocks": model.order, "micro_batches": 4} | options
        return body(world, npuzero.pipeline(model, npuzero.mesh(world=world, pipe=2), 2, **given))

    return comm.run_threads(2, rank, timeout_s=20)


def test_evaluation_gives_logits_on_the_last_rank_and_a_loss_on_all():
    tokens, target = SGD.batch(0, 0)
    model = build_seeded_model(make=DeepModel)
    expected = model(tokens).detach()

    def evaluate(world: World, pipe: Any) -> Any:
        pipe.eval()
        logits, loss = pipe.step(tokens, train=False), pipe.step(tokens, target=target, train=False)
        assert not any(parameter.grad is not None for parameter in pipe.parameters())
        return logits, loss

    (none, first), (logits, last) = on_two_ranks(evaluate)
    assert none is None
    torch.testing.assert_close(logits, expected)
    torch.testing.assert_close(last, pipeline_loss(expected, target))
    assert first == last


def test_the_loss_is_the_mean_over_data_ranks():
    run = replace(SGD, data=2)
    assert_like_plain(run, train_pipeline(run, 2, 2), 1e-6)


def test_batches_of_other_lengths_follow_each_other():
    def train(world: World, pipe: Any) -> list[float]:
        return [pipe.step(*each[:1], target=each[1]).item() for each in batches]

    batches = [tuple(part[:, :length] for part in SGD.batch(0, 0)) for length in (5, 3, 4)]
    model = build_seeded_model(make=DeepModel)
    expected = [pipeline_loss(model(tokens), target).item() for tokens, target in batches]
    for losses in on_two_ranks(train):
        torch.testing.assert_close(losses, expected)


def test_modules_know_whether_they_train():
    def modes(world: World, pipe: Any) -> list[bool]:
        pipe.eval()
        mode = [module.training for module in pipe.modules()]
        pipe.train()
        return [any(mode), all(module.training for module in pipe.modules())]

    assert on_two_ranks(modes) == [[False, True]] * 2


class RecomputedPipelineBlock(PipelineBlock):
    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(super().forward, x, use_reentrant=False)


class RecomputedDeep(DeepModel):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(RecomputedPipelineBlock() for _ in self.blocks)


@pytest.mark.parametrize("stage", [2, 3])
def test_activation_checkpointing_inside_stages(stage: int):
    run = replace(SGD, make=RecomputedDeep)
    assert_like_plain(run, train_pipeline(run, 2, stage), 1e-6)


def test_a_scaled_loss_gives_the_same_update():
    def train(world: World, pipe: Any) -> Any:
        optimizer = SGD.optimizer(pipe.parameters(), plain=False)
        scaler = npuzero.LossScaler(init_scale=2.0**10)
        losses = []
        for step in range(SGD.steps):
            tokens, target = SGD.batch(step, 0)
            losses.append(pipe.step(tokens, target=target, scaler=scaler).item())
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        return npuzero.full_state_dict(pipe, rank0_only=False), losses

    state, losses, _ = train_pipeline_plain(SGD)
    for found, own in on_two_ranks(train):
        torch.testing.assert_close(own, losses, rtol=1e-6, atol=0)
        for name, value in found.items():
            torch.testing.assert_close(value, state[name], rtol=1e-5, atol=1e-7)


def test_a_gradient_that_is_no_number_in_one_stage_skips_the_step_of_all():
    def train(world: World, pipe: Any) -> Any:
        optimizer = SGD.optimizer(pipe.parameters(), plain=False)
        bad = False
        if world.rank == 0:  # the embedding's gradient is the last: no other stage has it
            next(pipe.parameters()).register_hook(lambda gradient: gradient * float("nan") if bad else gradient)
        skipped = []
        for step in (0, 7, 1, 2):
            bad = step == 7
            tokens, target = SGD.batch(step, 0)
            pipe.step(tokens, target=target)
            skipped.append(npuzero.skip_nonfinite_(pipe).item())
            optimizer.step()
            optimizer.zero_grad()
        return npuzero.full_state_dict(pipe, rank0_only=False), skipped

    state, _, _ = train_pipeline_plain(SGD)
    for found, skipped in on_two_ranks(train):
        assert skipped == [False, True, False, False]
        for name, value in found.items():
            torch.testing.assert_close(value, state[name], rtol=1e-5, atol=1e-7)


class IdleParameterModel(DeepModel):
    """A model with an unused parameter in its last block."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks[-1].idle = nn.Parameter(torch.ones(3))


def test_an_unused_parameter_of_one_stage_is_named_by_all():
    def train(world: World, pipe: Any) -> None:
        optimizer = SGD.optimizer(pipe.parameters(), plain=False)
        tokens, target = SGD.batch(0, 0)
        pipe.step(tokens, target=target)
        with pytest.raises(StateError, match=r"none, on some rank, of blocks\.13\.idle\."):
            optimizer.step()

    on_two_ranks(train, IdleParameterModel, settings=Settings(ignore_unused_parameters=False))


def test_outputs_of_several_tensors_travel():
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(WIDTH, WIDTH)

        def forward(self, pair: tuple[Tensor, Tensor] | Tensor) -> tuple[Tensor, Tensor]:
            x, count = pair if isinstance(pair, tuple) else (pair, torch.zeros(len(pair), dtype=torch.int64))
            return x + self.linear(x), count + 1

    def train(world: World) -> Any:
        model = build_seeded_model(make=lambda: nn.Sequential(*(Two() for _ in range(4))))
        mesh = npuzero.mesh(world=world, pipe=2)
        pipe = npuzero.pipeline(model, mesh, 3, micro_batches=2, loss_fn=lambda pair: pair[0].square().mean())
        loss = pipe.step(torch.ones(4, WIDTH))
        return loss, pipe.step(torch.ones(4, WIDTH), train=False)

    (loss, _), (same, output) = comm.run_threads(2, train, timeout_s=20)
    assert loss == same
    assert output[1].tolist() == [4] * 4
