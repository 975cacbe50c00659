"""Inputs of torch's activation checkpointing, offloaded to the host: the same bits, exact bytes, two on the device."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import npuzero
from npuzero import Memory, Placement, Plan, comm
from npuzero.comm import World
from npuzero.errors import ConfigError, StateError

from .toy import build_seeded_model

# Dynamo reads gradients of non-leaf tensors, and ranks that are threads undo each other's warning filters.
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")

DIM, LAYERS, TOKENS = 128, 4, 256
INPUT = TOKENS * DIM * 4  # bytes of a block's input in float32


class NormMlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(DIM)
        self.up, self.down = nn.Linear(DIM, 2 * DIM), nn.Linear(2 * DIM, DIM)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.nn.functional.gelu(self.up(self.norm(x))))


class CheckpointedChain(nn.Module):
    """Blocks, checkpointed in groups of ``interval``, with this many tensors kept."""

    reentrant, interval, kept = False, 1, LAYERS

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(DIM, DIM)
        self.blocks = nn.ModuleList(NormMlp() for _ in range(LAYERS))
        self.last = nn.Linear(DIM, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for at in range(0, LAYERS, self.interval):
            x = self.checkpointed(at, x)
        return self.last(x).mean()

    def checkpointed(self, at: int, x: Tensor) -> Tensor:
        return checkpoint(self.some, at, x, use_reentrant=self.reentrant)

    def some(self, at: int, x: Tensor) -> Tensor:
        for block in self.blocks[at : at + self.interval]:
            x = block(x)
        return x


class ReentrantChain(CheckpointedChain):
    reentrant = True


class PairsChain(CheckpointedChain):
    interval, kept = 2, LAYERS // 2


class NestedChain(CheckpointedChain):
    """Each block twice under a checkpoint: the inner one's tensors are not kept at all."""

    def checkpointed(self, at: int, x: Tensor) -> Tensor:
        return checkpoint(super().checkpointed, at, x, use_reentrant=self.reentrant)


class NestedReentrant(NestedChain):
    reentrant = True


class TransposedChain(CheckpointedChain):
    """Inputs with other strides: sums depend on the memory order."""

    def checkpointed(self, at: int, x: Tensor) -> Tensor:
        return super().checkpointed(at, x.t().contiguous().t())


class TwiceChain(CheckpointedChain):
    """Each input is kept by two checkpoints."""

    def checkpointed(self, at: int, x: Tensor) -> Tensor:
        return super().checkpointed(at, x) + super().checkpointed(at, x)


class EncodedChain(CheckpointedChain):
    """All checkpoints keep one tensor in addition to their input, and it moves once."""

    kept = LAYERS + 1

    def forward(self, x: Tensor) -> Tensor:
        self.encoded = self.first(x).sin()
        return super().forward(x)

    def checkpointed(self, at: int, x: Tensor) -> Tensor:
        block = self.blocks[at]
        return checkpoint(lambda x, encoded: block(x + encoded), x, self.encoded, use_reentrant=self.reentrant)


class EncodedReentrant(EncodedChain):
    reentrant = True


class WithWeights(CheckpointedChain):
    """Checkpoints that keep parameters, and views of them, in addition to the input."""

    def checkpointed(self, at: int, x: Tensor) -> Tensor:
        block = self.blocks[at]
        with_weights = (self.first.weight, self.first.weight.t(), torch.ones(TOKENS, DIM))
        return checkpoint(lambda x, w, t, mask: block(x @ w + x @ t) * mask, x, *with_weights, use_reentrant=False)


MODELS = [
    CheckpointedChain,
    ReentrantChain,
    PairsChain,
    NestedChain,
    NestedReentrant,
    TransposedChain,
    TwiceChain,
    EncodedChain,
    EncodedReentrant,
    WithWeights,
]


def plan_with_far_activations(preset: str | int, precision: str = "fp32", memory: Memory = Memory.HOST) -> Plan:
    return replace(Plan.preset(preset, precision=precision), activations=Placement(memory=memory))


def activation_data(step: int, rank: int) -> Tensor:
    return torch.randn(TOKENS, DIM, generator=torch.Generator().manual_seed(10 * step + rank))


class ActivationRun:
    """A model in training on one rank."""

    def __init__(self, make: Callable[[], nn.Module], plan: Plan, world: World, **options: Any) -> None:
        self.rank = world.rank
        self.model: Any = npuzero.zero(build_seeded_model(make=make), plan=plan, **options)
        self.optimizer = npuzero.AdamW(self.model.parameters(), lr=0.01)

    def loss(self, step: int) -> Tensor:
        loss: Tensor = self.model(activation_data(step, self.rank))
        return loss

    def end(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()

    def state(self) -> dict[str, Tensor]:
        state = npuzero.full_state_dict(self.model, rank0_only=False)
        return {name: value.clone() for name, value in state.items()}

    def host_bytes(self) -> int:
        return npuzero.report(self.model).held[Memory.HOST]["activations"]

    def moved(self) -> tuple[int, int]:
        moved = npuzero.report(self.model).bytes_moved
        return moved["device>host"], moved["host>device"]


def plain_loop(run: ActivationRun) -> None:
    for step in range(3):
        run.loss(step).backward()
        run.end()


def count_moved_bytes(run: ActivationRun) -> tuple[int, int]:
    plain_loop(run)
    return run.moved()


def train_both_ways(
    make: Callable[[], nn.Module],
    plan: Plan,
    loop: Callable[[ActivationRun], Any] = plain_loop,
    ranks: int = 1,
    **options: Any,
) -> list[Any]:
    """Train with activations on the device and on the host: the same bits. Return the results of ``loop`` by rank."""

    def train(plan: Plan, world: World) -> tuple[dict[str, Tensor], Any]:
        run = ActivationRun(make, plan, world, **options)
        seen = loop(run)
        return run.state(), seen

    near = comm.run_threads(ranks, lambda world: train(replace(plan, activations=Placement()), world))
    away = comm.run_threads(ranks, lambda world: train(plan, world))
    for (want, _), (got, _) in zip(near, away, strict=True):
        assert want.keys() == got.keys()
        assert all(torch.equal(want[name], got[name]) for name in want)
    return [seen for _, seen in away]


@pytest.mark.checkered
@pytest.mark.parametrize("make", MODELS)
@pytest.mark.parametrize("preset", ["zero0", "zero1", "zero2", "zero3"])
def test_bits_and_bytes(preset: str, make: type[CheckpointedChain]) -> None:
    for moved in train_both_ways(make, plan_with_far_activations(preset), count_moved_bytes, ranks=2):
        assert moved == 2 * (make.kept * INPUT,)


@pytest.mark.parametrize("make", [CheckpointedChain, PairsChain])
def test_in_bf16_two_bytes_an_element_move_each_way(make: type[CheckpointedChain]) -> None:
    for moved in train_both_ways(make, plan_with_far_activations("zero3", "bf16"), count_moved_bytes, ranks=2):
        assert moved == 2 * (2 * TOKENS * DIM * LAYERS // make.interval,)


def test_the_device_holds_two_inputs_and_the_host_all_of_them() -> None:
    """One in use and one in transit; they use the same host addresses each time."""
    alive: list[weakref.ref[Any]] = []
    most: list[int] = []

    class Counted(CheckpointedChain):
        def some(self, at: int, x: Tensor) -> Tensor:
            alive.append(weakref.ref(x.untyped_storage()))
            gc.collect()
            most.append(sum(storage() is not None for storage in alive))
            return super().some(at, x)

    def rank(world: World) -> list[int]:
        run, held = ActivationRun(Counted, plan_with_far_activations("zero2"), world), []
        for step in range(4):
            run.loss(step).backward()
            run.end()
            held.append(run.host_bytes())
        return held

    gc.collect()
    gc.freeze()  # so that no collection scans the objects of earlier tests
    (held,) = comm.run_threads(1, rank)
    assert set(held) == {max(LAYERS * INPUT, 2**20)}
    assert len(most) == 8 * LAYERS and max(most) <= 3


# Orders of forwards and backwards in programs, and the number of inputs that move each way.


def accumulates(run: ActivationRun) -> None:
    for step in range(3):
        for micro_batch in range(3):
            (run.loss(3 * step + micro_batch) / 3).backward()
        run.end()


def forwards_first(run: ActivationRun) -> None:
    for step in range(3):
        losses = [run.loss(3 * step + i) for i in range(3)]
        for loss in (losses[1], losses[0], losses[2]):
            loss.backward()
        run.end()


def backward_twice(run: ActivationRun) -> None:
    for step in range(3):
        loss = run.loss(step)
        loss.backward(retain_graph=True)
        loss.backward()
        run.end()


def backward_never_comes(run: ActivationRun) -> None:
    kept = [run.loss(7)]
    for step in range(3):
        run.loss(8)
        run.loss(step).backward()
        run.end()
    del kept


def evaluates_before_backward(run: ActivationRun) -> None:
    for step in range(3):
        loss = run.loss(step)
        with torch.no_grad():
            run.loss(5)
        loss.backward()
        run.end()


def raises_midway(run: ActivationRun) -> None:
    def fail(*_: Any) -> None:
        raise ValueError("midway")

    for step in range(3):
        hook = run.model.blocks[2].register_forward_pre_hook(fail)
        with pytest.raises(ValueError, match="midway"):
            run.loss(step)
        hook.remove()
        run.loss(step).backward()
        run.end()


def raises_in_backward(run: ActivationRun) -> None:
    def fail(*_: Any) -> None:
        raise ValueError("midway")

    for step in range(3):
        hook = run.model.blocks[2].register_full_backward_pre_hook(fail)
        with pytest.raises(ValueError, match="midway"):
            run.loss(step).backward()
        hook.remove()
        run.optimizer.zero_grad()
        run.loss(step).backward()
        run.end()


def autocasts(run: ActivationRun) -> None:
    for step in range(3):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = run.loss(step)
        loss.backward()
        run.end()


def shapes_change(run: ActivationRun) -> None:
    for step in range(6):
        run.model(activation_data(step, 0)[: TOKENS - 7 * (step % 3)].repeat(2, 1)).backward()
        run.end()


LOOPS = {  # and the peak number of inputs in a step
    accumulates: 1,
    forwards_first: 3,
    backward_twice: 1,
    backward_never_comes: 3,
    evaluates_before_backward: 1,
    raises_midway: 1,
    raises_in_backward: 1,
    autocasts: 1,
    shapes_change: 2,
}


@pytest.mark.checkered
@pytest.mark.parametrize("make", [CheckpointedChain, ReentrantChain])
@pytest.mark.parametrize("preset", ["zero2", "zero3"])
@pytest.mark.parametrize("loop", LOOPS, ids=lambda loop: loop.__name__)
@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")  # without gradients, of course not
def test_nothing_leaks_and_nothing_is_overwritten(loop: Any, preset: str, make: type[CheckpointedChain]) -> None:
    if loop in (backward_twice, raises_in_backward) and make is ReentrantChain and preset == "zero3":
        pytest.skip("what reentrant checkpointing does there is not of activations")

    def run(run: ActivationRun) -> int | None:
        loop(run)
        held = npuzero.report(run.model).held
        return held[Memory.HOST]["activations"] if Memory.HOST in held else None

    for held in train_both_ways(make, plan_with_far_activations(preset), run):
        assert held <= -(-LOOPS[loop] * LAYERS * INPUT // 2**20) * 2**20  # segments have a MiB at least


@pytest.mark.parametrize("make", [CheckpointedChain, ReentrantChain])
@pytest.mark.parametrize("preset", ["zero2", "zero3"])
def test_on_nvme(preset: str, make: type[CheckpointedChain], tmp_path: Path) -> None:
    settings = npuzero.Settings(nvme_paths=(str(tmp_path),))
    plan = plan_with_far_activations(preset, memory=Memory.NVME)

    def loop(run: ActivationRun) -> dict[str, int]:
        accumulates(run)
        return npuzero.report(run.model).bytes_moved

    for moved in train_both_ways(make, plan, loop, ranks=2, settings=settings):
        assert set(moved.values()) == {3 * LAYERS * INPUT}
    assert not list(tmp_path.iterdir())


def test_nvme_without_folders_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NPUZERO_NVME_PATHS", raising=False)

    def rank(world: World) -> None:
        with pytest.raises(ConfigError, match="nvme_paths"):
            npuzero.zero(CheckpointedChain(), plan=plan_with_far_activations("zero2", memory=Memory.NVME))

    comm.run_threads(2, rank)


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.slow
def test_compiled_blocks(backend: str) -> None:
    def loop(run: ActivationRun) -> tuple[int, int]:
        for block in run.model.blocks:
            block.compile(backend=backend)
        plain_loop(run)
        return run.moved()

    assert train_both_ways(CheckpointedChain, plan_with_far_activations("zero3"), loop) == [2 * (LAYERS * INPUT,)]


def test_a_model_without_checkpointing_moves_nothing() -> None:
    class Kept(CheckpointedChain):
        def checkpointed(self, at: int, x: Tensor) -> Tensor:
            return self.some(at, x)

    assert train_both_ways(Kept, plan_with_far_activations("zero2"), count_moved_bytes) == [(0, 0)]


def test_hooks_of_the_program_come_first() -> None:
    """Under nested hooks around the model, as of a checkpoint of the full model, no tensor is moved twice or leaked."""

    def loop(run: ActivationRun) -> tuple[int, int]:
        for step in range(3):
            checkpoint(run.loss, step, use_reentrant=False).backward()
            run.end()
        return run.moved()

    assert train_both_ways(CheckpointedChain, plan_with_far_activations("zero2"), loop) == [(0, 0)]


@pytest.mark.parametrize("make", [CheckpointedChain, ReentrantChain])
def test_a_write_in_place_is_an_error(make: type[CheckpointedChain]) -> None:
    class Writes(make):  # type: ignore[misc, valid-type]
        def checkpointed(self, at: int, x: Tensor) -> Tensor:
            y = super().checkpointed(at, x)
            return x.add_(y) if at == 2 else y

    class WritesSaved(make):  # type: ignore[misc, valid-type]
        def forward(self, x: Tensor) -> Tensor:
            x = self.first(x)
            y = x * x
            x.add_(1)
            return self.last(super().checkpointed(0, y)).mean()

    def rank(world: World) -> None:
        for made in (Writes, WritesSaved):
            run = ActivationRun(made, plan_with_far_activations("zero0"), world)
            with pytest.raises(StateError, match="written in place"):
                run.loss(0).backward()

    comm.run_threads(1, rank)


def test_a_method_is_a_forward_too() -> None:
    class Encoder(CheckpointedChain):
        def encode(self, x: Tensor) -> Tensor:
            return self.forward(x)

    def loop(run: ActivationRun) -> tuple[int, int]:
        npuzero.register_forward_method(run.model, "encode")
        for step in range(3):
            run.model.encode(activation_data(step, run.rank)).backward()
            run.end()
        return run.moved()

    assert train_both_ways(Encoder, plan_with_far_activations("zero3"), loop, ranks=2) == 2 * [2 * (LAYERS * INPUT,)]


def test_the_thread_ends_with_the_model() -> None:
    def rank(world: World) -> None:
        before = threading.enumerate()
        run = ActivationRun(CheckpointedChain, plan_with_far_activations("zero1"), world)
        plain_loop(run)
        (lane,) = (each for each in threading.enumerate() if each not in before and "activations" in each.name)
        del run
        gc.collect()
        lane.join(10)
        assert not lane.is_alive()

    comm.run_threads(1, rank)


def test_what_a_plan_may_say() -> None:
    with pytest.raises(ConfigError, match=r"activations\.axes"):
        Plan(activations=Placement(("local",), Memory.HOST))
    with pytest.raises(ConfigError, match=r"activations\.share"):
        Plan(activations=Placement((), Memory.HOST, 0.5))
    with pytest.raises(ConfigError, match="activations"):
        Plan(activations="host")  # type: ignore[arg-type]

    def rank(world: World) -> None:
        with pytest.raises(ConfigError, match=r"unit_plans: blocks\.1, activations"):
            npuzero.zero(CheckpointedChain(), stage=0, unit_plans={"blocks.1": plan_with_far_activations("zero0")})
        npuzero.zero(CheckpointedChain(), plan=plan_with_far_activations("zero0"), unit_plans={"blocks.1": "zero3"})

    comm.run_threads(1, rank)
