"""A fault on one stage is an error on every rank, within seconds; it names the stage and the micro-batch."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import npuzero
from npuzero import CollectiveError, ConfigError, NpuZeroError, StateError, comm
from npuzero.comm import World
from npuzero.plan import DATA
from world.toy import build_seeded_model

from .pipeline_training import DeepModel, PipelineRun, pipeline_loss, relative_distance, train_pipeline_plain

RUN = PipelineRun()
SOON_S = 5.0


class FaultyModule(nn.Module):
    """Pass the input on, with settable faults in forward and for gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()), requires_grad=False)
        self.calls = 0
        self.fault: Callable[[int, Tensor], Any] = lambda _, x: x

    def forward(self, x: Tensor) -> Any:
        self.calls += 1
        return self.fault(self.calls - 1, x)


class RaisesInBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        raise ZeroDivisionError("in backward")


class FaultyModel(DeepModel):
    """A model with faulty modules after the second block and the last but one."""

    def __init__(self) -> None:
        super().__init__(layers=6)
        self.faults = nn.ModuleList(FaultyModule() for _ in range(2))

    @property
    def order(self) -> list[nn.Module]:
        first, last = self.faults
        return [self.tokens, *self.blocks[:2], first, *self.blocks[2:5], last, self.blocks[5], self.norm, self.head]

    def forward(self, tokens: Tensor) -> Tensor:
        x: Tensor = tokens
        for module in self.order:
            x = module(x)
        return x


HEALTHY = PipelineRun(make=FaultyModel)
#: The split of the eleven blocks: each stage has a faulty module, the first stage at its end.
SPLIT = [4, 7]


def run_faulty_pipeline(
    body: Callable[[World, Any], Any], *, data: int = 1, timeout_s: float = 20.0, stage: int = 2, **options: Any
) -> list[Any]:
    def rank(world: World) -> Any:
        model = build_seeded_model(make=FaultyModel)
        mesh = npuzero.mesh(world=world, pipe=2, local_size=1)
        given = {"loss_fn": pipeline_loss, "blocks": model.order, "micro_batches": 4, "split": SPLIT} | options
        pipe = npuzero.pipeline(model, mesh, stage, **given)
        pipe.world_index = mesh.index(DATA)
        return body(world, pipe)

    return comm.run_threads(2 * data, rank, timeout_s=timeout_s)


def set_stage_fault(stage: int, fault: Callable[[int, Tensor], Any]) -> Callable[[World, Any], None]:
    """Set the fault of a stage on the ranks of that stage."""

    def arrange(world: World, pipe: Any) -> None:
        if stage in pipe.numbers:
            pipe.faults.get_submodule(str(stage)).fault = fault

    return arrange


def raise_at_call(number: int) -> Callable[[int, Tensor], Any]:
    def fault(call: int, x: Tensor) -> Tensor:
        if call == number:
            raise KeyError("on purpose")
        return x

    return fault


def backward_raises(number: int) -> Callable[[int, Tensor], Any]:
    return lambda call, x: RaisesInBackward.apply(x) if call == number else x


FAULTS: dict[str, tuple[Callable[[int, Tensor], Any], str]] = {
    "forward, first": (raise_at_call(0), "forward of micro-batch #0: KeyError: 'on purpose'"),
    "forward": (raise_at_call(2), "forward of micro-batch #2: KeyError: 'on purpose'"),
    "backward": (backward_raises(1), "backward of micro-batch #1: ZeroDivisionError: in backward"),
}


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
@pytest.mark.parametrize("stage", [0, 1])
@pytest.mark.parametrize("fault", FAULTS)
def test_a_stage_that_raises_is_named_on_every_rank_and_training_goes_on(fault: str, stage: int, schedule: str):
    what, says = FAULTS[fault]

    def train(world: World, pipe: Any) -> Any:
        optimizer = RUN.optimizer(pipe.parameters(), plain=False)
        arrange, mend = set_stage_fault(stage, what), set_stage_fault(stage, lambda _, x: x)
        for step in range(RUN.steps):
            tokens, target = RUN.batch(step, 0)
            if step == 1:
                arrange(world, pipe)
                for faulty in getattr(pipe, "faults", nn.Module()).children():
                    faulty.calls = 0
                began_s = time.monotonic()
                with pytest.raises(StateError) as met:
                    pipe.step(tokens, target=target)
                assert time.monotonic() - began_s < SOON_S
                assert f"on rank {stage}: stage {stage}, {says}" in str(met.value)
                mend(world, pipe)
                optimizer.zero_grad()
            pipe.step(tokens, target=target)
            optimizer.step()
            optimizer.zero_grad()
        return npuzero.full_state_dict(pipe, rank0_only=False)

    expected, *_ = train_pipeline_plain(HEALTHY)
    for state in run_faulty_pipeline(train, schedule=schedule):
        assert relative_distance({name: value for name, value in state.items() if value.dim()}, expected) <= 1e-6


def check_pipeline_refuses(
    body: Callable[[World, Any], Any], kind: type[NpuZeroError], *says: str, **options: Any
) -> None:
    """Check that every rank raises an error of this kind with this text."""

    def rank(world: World, pipe: Any) -> NpuZeroError:
        with pytest.raises(kind) as met:
            body(world, pipe)
        time.sleep(0.3)  # so that no rank learns it from this rank's end
        return met.value

    for error in run_faulty_pipeline(rank, **options):
        for words in says:
            assert words in str(error), (words, str(error))


def faulty_pipeline_step(arrange: Callable[[World, Any], None] = lambda *_: None) -> Callable[[World, Any], Any]:
    def body(world: World, pipe: Any) -> Any:
        arrange(world, pipe)
        tokens, target = RUN.batch(0, 0)
        return pipe.step(tokens, target=target)

    return body


def test_micro_batches_of_unequal_shapes():
    cut = set_stage_fault(0, lambda call, x: x[:, :-1] if call == 2 else x)
    check_pipeline_refuses(
        faulty_pipeline_step(cut),
        StateError,
        "stage 0>1 #2",
        "the same from every micro-batch",
        "[2, 5, 16]",
        "[2, 4, 16]",
    )


def test_an_output_that_is_no_tensor():
    check_pipeline_refuses(
        faulty_pipeline_step(set_stage_fault(0, lambda _, x: {"x": x})),
        StateError,
        "stage 0, forward of micro-batch #0",
        "a tensor",
        "dict",
    )


def test_a_loss_that_is_none():
    def body(world: World, pipe: Any) -> Any:
        return pipe.step(RUN.batch(0, 0)[0])

    check_pipeline_refuses(body, StateError, "on rank 1: stage 1", "the loss", "one element", loss_fn=None)


def test_a_batch_that_does_not_divide():
    def body(world: World, pipe: Any) -> Any:
        return pipe.step(torch.zeros(6, 5, dtype=torch.int64), target=torch.zeros(6, 5, dtype=torch.int64))

    check_pipeline_refuses(body, StateError, "the batch", "4 micro-batches", "6")


def test_a_call_without_gradients():
    def body(world: World, pipe: Any) -> Any:
        with torch.no_grad():
            return faulty_pipeline_step()(world, pipe)

    check_pipeline_refuses(body, StateError, "torch.no_grad()", "train=False")


def test_clipping_on_one_stage_alone():
    def body(world: World, pipe: Any) -> Any:
        faulty_pipeline_step()(world, pipe)
        if world.rank == 0:
            npuzero.clip_grad_norm_(pipe, 1.0)
        pipe.step(*(RUN.batch(1, 0)[:1]), target=RUN.batch(1, 0)[1])

    began_s = time.monotonic()
    check_pipeline_refuses(body, CollectiveError, "clip_grad_norm_", "pipeline.step")
    assert time.monotonic() - began_s < 2 * SOON_S


def test_one_data_rank_alone_raises():
    """Its data peer waits in a collective that the failing rank has left: every error names the place of each rank."""

    def body(world: World, pipe: Any) -> Any:
        if world.rank == 0:
            set_stage_fault(0, raise_at_call(1))(world, pipe)
        tokens, target = PipelineRun(data=2).batch(0, pipe.world_index)
        pipe.step(tokens, target=target)

    def rank(world: World, pipe: Any) -> NpuZeroError:
        with pytest.raises((CollectiveError, StateError)) as met:
            body(world, pipe)
        time.sleep(0.3)
        return met.value

    began_s = time.monotonic()
    errors = run_faulty_pipeline(rank, data=2, stage=3)
    assert time.monotonic() - began_s < 2 * SOON_S
    assert all("pipeline.step" in str(error) for error in errors)
    assert isinstance(errors[0].__cause__, KeyError)  # the rank that raised keeps the cause
    for error in errors:  # and every rank names it
        assert "stage 0, forward of micro-batch #" in str(error) and "KeyError: 'on purpose'" in str(error), str(error)


# --- refused before anything moves ------------------------------------------------------------------------------------


def check_construction_refused(*says: str, kind: type[NpuZeroError] = ConfigError, **options: Any) -> None:
    """Check that every rank refuses ``options``, which may be functions of the world."""

    def rank(world: World) -> NpuZeroError:
        model = build_seeded_model(make=FaultyModel)
        given: dict[str, Any] = {"loss_fn": pipeline_loss, "blocks": model.order, "micro_batches": 4, "split": SPLIT}
        given |= {name: value(world) if callable(value) else value for name, value in options.items()}
        with pytest.raises(kind) as met:
            npuzero.pipeline(model, npuzero.mesh(world=world, pipe=2), **{"stage": 2, **given})
        return met.value

    for error in comm.run_threads(2, rank, timeout_s=20):
        for words in says:
            assert words in str(error), (words, str(error))


def test_ranks_of_different_minds():
    check_construction_refused("micro_batches", "the same on every rank", micro_batches=lambda world: 4 + world.rank)
    check_construction_refused(
        "schedule", "the same on every rank", schedule=lambda world: ("gpipe", "1f1b")[world.rank]
    )
    check_construction_refused("stages", "the same on every rank", split=lambda world: [4 + world.rank, 7 - world.rank])


def test_one_rank_that_cannot_tells_the_others():
    check_construction_refused("no-such", "1f1b", schedule=lambda world: ("1f1b", "no-such")[world.rank])


def test_what_cannot_be_cut():
    check_construction_refused("12", "11", split=None, schedule="interleaved", chunks=6)  # more stages than blocks
    check_construction_refused(
        "interleaved", "micro-batches", schedule="interleaved", chunks=2, split=None, micro_batches=3
    )
    check_construction_refused("micro-batches", micro_batches=0)


def test_what_a_stage_cannot_follow() -> None:
    """A plan with groups of ranks larger than a stage."""
    check_construction_refused("local_size", stage=None, plan=npuzero.Plan.preset("hsdp", local_size=2))


@pytest.mark.parametrize(
    ("name", "value"),
    [("split", 2), ("split", [None, 4]), ("split", {0: 4, 1: 7}), ("blocks", 3), ("blocks", []), ("loss_fn", 3)],
)
def test_arguments_of_another_kind(name: str, value: object) -> None:
    check_construction_refused(name, **{name: value})


def test_neither_a_model_nor_a_mesh() -> None:
    for model, mesh, says in ((None, None, "model"), (nn.Linear(2, 2), 2, "mesh")):
        with pytest.raises(ConfigError, match=says):
            npuzero.pipeline(model, mesh, 2, micro_batches=2)


def test_a_stage_without_parameters():
    def rank(world: World) -> None:
        model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2), nn.ReLU())
        with pytest.raises(ConfigError, match=r"stage 1.*parameter"):
            npuzero.pipeline(model, npuzero.mesh(world=world, pipe=2), 2, micro_batches=2, split=[2, 1])

    comm.run_threads(2, rank, timeout_s=20)
