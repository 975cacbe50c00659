"""Parts of a model that run forward and backward separately, as the stages on a pipeline rank do, in any order."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import cache, partial
from itertools import count
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import npuzero
from npuzero import ConfigError, Placement, Plan, Report, StateError, comm, observe
from npuzero.api.model import engine_of
from npuzero.comm import World
from npuzero.observe import Events, Instant, Span
from world.toy import build_seeded_model
from world.train import BOUND, State, assert_same_bits, assert_states_close

SIZE, WIDTH = 2, 8
#: One move of a part: its number, and whether it is a backward pass. Each part's run in order of their micro-batches.
Act = tuple[int, bool]
Make = Callable[[], nn.Module]
F0, B0, F1, B1 = (0, False), (0, True), (1, False), (1, True)


class PartBlock(nn.Module):
    """A unit; ``build_checkpointed_chain`` makes it recompute in backward."""

    def __init__(self, frozen: bool = False, checkpointed: bool = False) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, 2 * WIDTH).requires_grad_(not frozen)
        self.out = nn.Linear(2 * WIDTH, WIDTH)
        self.checkpointed = checkpointed

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.compute, x, use_reentrant=False) if self.checkpointed else self.compute(x)

    def compute(self, x: Tensor) -> Tensor:
        return x + self.out(torch.tanh(self.inner(x)))


class StageChain(nn.Module):
    """Stages of blocks, each called by its number; the root owns only the parameters outer stages share, if any."""

    def __init__(self, stages: int = 2, blocks: int = 2, tied: bool = False, **block: bool) -> None:
        super().__init__()
        self.stages = nn.ModuleList(nn.ModuleList(PartBlock(**block) for _ in range(blocks)) for _ in range(stages))
        self.tied = nn.Parameter(torch.randn(WIDTH, WIDTH) / 3) if tied else None

    def forward(self, stage: int, x: Tensor) -> Tensor:
        if stage == 0 and self.tied is not None:
            x = x @ self.tied
        for block in self.stages[stage]:
            x = block(x)
        if stage == len(self.stages) - 1 and self.tied is not None:
            x = x @ self.tied.T
        return x


def build_tied_chain() -> StageChain:
    return StageChain(tied=True)


def build_one_stage_chain() -> StageChain:
    return StageChain(stages=1, blocks=3)


def build_frozen_chain() -> StageChain:
    """Freeze partly: in each block, and one stage's last block completely."""
    model = StageChain(frozen=True)
    model.stages[1][1].requires_grad_(False)
    return model


def build_checkpointed_chain() -> StageChain:
    return StageChain(checkpointed=True)


def one_f_one_b(micro_batches: int, ahead: int = 2) -> list[Act]:
    """F0 F1 B0 F2 B1 ...: of one part, of which ``ahead`` forwards run before the first backward."""
    ahead = min(ahead, micro_batches)
    return [F0] * ahead + [B0, F0] * (micro_batches - ahead) + [B0] * ahead


#: Two parts in turns, with three micro-batches.
INTERLEAVED = [F0, F0, F1, B1, F1, B0, F0, B1, F1, B0, B1, B0]
GPIPE = [F0, F0, F0, F1, F1, F1, B1, B1, B1, B0, B0, B0]


def draw_part_input(step: int, micro_batch: int, rank: int) -> Tensor:
    generator = torch.Generator().manual_seed(1000 * step + 10 * micro_batch + rank)
    return torch.randn(3, WIDTH, generator=generator)


class ActRunner:
    """Run acts: each part's output is the next part's input, and the last one's is the loss.

    Attributes:
        losses: of the micro-batches.
    """

    def __init__(self, model: nn.Module, rank: int, step: int) -> None:
        self._model, self._rank, self._step = model, rank, step
        self._last = len(model.stages) - 1
        self._inputs: dict[tuple[int, int], Tensor] = {}
        self._outputs: dict[tuple[int, int], Tensor] = {}
        self._done: Counter[Act] = Counter()
        self.losses: list[Tensor] = []

    def act(self, act: Act) -> None:
        observe.instant("act", "FB"[act[1]] + str(act[0]))
        micro_batch = self._done[act]
        self._done[act] += 1
        with engine_of(self._model).passes.part(act[0]):
            self.backward(act[0], micro_batch) if act[1] else self.forward(act[0], micro_batch)

    def forward(self, stage: int, micro_batch: int) -> None:
        at = stage, micro_batch
        if stage:
            self._inputs[at] = self._outputs[stage - 1, micro_batch].detach().requires_grad_()
        else:
            self._inputs[at] = draw_part_input(self._step, micro_batch, self._rank)
        output = self._model(stage, self._inputs[at])
        if stage == self._last:
            output = output.square().mean()
            self.losses.append(output.detach())
        self._outputs[at] = output

    def finish(self) -> None:
        """End the step's passes."""

    def seed(self, stage: int, micro_batch: int) -> tuple[Tensor, Tensor | None]:
        """Return the output that a backward pass begins at, and its gradient."""
        return self._outputs.pop((stage, micro_batch)), None if stage == self._last else self._inputs.pop(
            (stage + 1, micro_batch)
        ).grad

    def backward(self, stage: int, micro_batch: int) -> None:
        torch.autograd.backward(*self.seed(stage, micro_batch))


#: Each rank's optimizer.
SGD = partial(npuzero.ZeroOptimizer, torch.optim.SGD)


class PartsOutcome(NamedTuple):
    """A rank's final result."""

    state: State
    losses: Tensor
    report: Report


def train_parts(
    make: Make,
    acts: Sequence[Act],
    plan: Plan,
    *,
    runner: type[ActRunner] = ActRunner,
    optimizer: Callable[..., Any] = SGD,
    lr: float = 0.1,
    steps: int = 3,
    size: int = SIZE,
) -> list[PartsOutcome]:
    """Train by ``acts`` on each rank, by SGD unless another is given."""

    def rank(world: World) -> PartsOutcome:
        model = npuzero.zero(build_seeded_model(make=make), plan=plan, world=world, units=PartBlock)
        stages = len(model.stages)
        if stages > 1:
            engine_of(model).passes.divide([[stage] for stage in model.stages])
        update = optimizer(model.parameters(), lr=lr)
        losses = []
        for step in range(steps):
            run = runner(model, world.rank, step)
            for act in acts:
                run.act(act)
            run.finish()
            update.step()
            update.zero_grad()
            losses += run.losses
        state = npuzero.full_state_dict(model, rank0_only=False)
        return PartsOutcome(
            {name: value.clone() for name, value in state.items()}, torch.stack(losses), npuzero.report(model)
        )

    return comm.run_threads(size, rank)


@cache
def train_parts_plain(make: Make, micro_batches: int, lr: float = 0.1, steps: int = 3) -> tuple[State, Tensor]:
    """Run plain torch on all ranks' data: return the state, and each rank's losses."""
    model = build_seeded_model(make=make)
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    losses = []
    for step in range(steps):
        for micro_batch in range(micro_batches):
            of_ranks = []
            for rank in range(SIZE):
                x = draw_part_input(step, micro_batch, rank)
                for stage in range(len(model.stages)):
                    x = model(stage, x)
                of_ranks.append(x.square().mean())
            torch.stack(of_ranks).mean().backward()
            losses.append(torch.stack(of_ranks).detach())
        optimizer.step()
        optimizer.zero_grad()
    return {name: value.detach().clone() for name, value in model.state_dict().items()}, torch.stack(losses)


def assert_as_plain(found: Sequence[PartsOutcome], make: Make, micro_batches: int) -> None:
    state, losses = train_parts_plain(make, micro_batches)
    for rank, each in enumerate(found):
        assert_same_bits(each.state, found[0].state)
        assert_states_close(each.state, state, BOUND)
        torch.testing.assert_close(each.losses, losses[:, rank], rtol=BOUND, atol=0)


CASES = [
    *(pytest.param(build_one_stage_chain, one_f_one_b(m), m, id=f"one part, {m} micro-batches") for m in (1, 3, 4)),
    pytest.param(StageChain, INTERLEAVED, 3, id="two parts interleaved"),
    pytest.param(StageChain, GPIPE, 3, id="two parts, all forwards first"),
    pytest.param(build_tied_chain, INTERLEAVED, 3, id="two parts that share a parameter"),
    pytest.param(build_frozen_chain, INTERLEAVED, 3, id="two parts, frozen in part"),
]
#: The first three sum gradients over micro-batches on each rank first, the rest over the ranks first: within each of
#: two orders all plans agree in all bits.
PLANS = ("zero0", "zero1", "zero1.5", "zero2", "zero3", "zero3 within the step")
ALIKE = (PLANS[:3], PLANS[3:])


def parts_plan(name: str, precision: str = "fp32") -> Plan:
    row, _, kept = name.partition(" ")
    plan = Plan.preset(row, local_size=1, precision=precision)
    return replace(plan, between=Placement()) if kept else plan


@pytest.mark.parametrize(("make", "acts", "micro_batches"), CASES)
def test_training_equals_plain_torch(make: Make, acts: list[Act], micro_batches: int) -> None:
    for plans in ALIKE:
        found = [train_parts(make, acts, parts_plan(plan)) for plan in plans]
        for each in found:
            assert_as_plain(each, make, micro_batches)
            assert_same_bits(each[0].state, found[0][0].state)


PLACED = (*PLANS, "hpz", "hpz within the step", "mics", "hsdp")


@pytest.mark.parametrize(("make", "acts", "micro_batches"), CASES)
def test_what_is_sent_and_held_is_foretold(make: Make, acts: list[Act], micro_batches: int) -> None:
    for name in PLACED:
        for precision in ("fp32", "bf16"):
            assert_parts_predicted(make, acts, parts_plan(name, precision), SIZE)


@pytest.mark.parametrize(("make", "acts"), [(build_one_stage_chain, one_f_one_b(4)), (StageChain, INTERLEAVED)])
def test_a_copy_that_is_held_after_forward_is_foretold(make: Make, acts: list[Act]) -> None:
    """A backward pass reshards a unit that a later forward holds: its backward gathers again, or the next forward."""
    for between in (None, Placement(("local",)), Placement()):
        assert_parts_predicted(make, acts, replace(Plan.preset("hpz", local_size=2), between=between), 4)


def assert_parts_predicted(make: Make, acts: Sequence[Act], plan: Plan, size: int) -> None:
    parts = [[f"stages.{i}"] for i in range(len(make().stages))]
    expected = npuzero.predict(make(), plan, size, units=PartBlock, acts=acts, parts=parts, moments=0)
    for _, _, report in train_parts(make, acts, plan, size=size):
        assert report.bytes_sent == expected.bytes_sent, plan.name
        assert report.held == expected.held, plan.name


def test_parameters_that_stay_within_the_step_are_gathered_once() -> None:
    """And otherwise once for each forward and once for each backward."""
    once = npuzero.predict(StageChain(), parts_plan("zero3 within the step"), SIZE, units=PartBlock).bytes_sent[
        "all_gather"
    ]
    for plan, times in (("zero3 within the step", 1), ("zero3", 2 * 3)):
        for each in train_parts(StageChain, INTERLEAVED, parts_plan(plan)):
            assert each.report.bytes_sent["all_gather"] == times * once


def test_checkpointing_within_a_stage() -> None:
    for plan in ("zero1", "zero3", "zero3 within the step"):
        found = train_parts(build_checkpointed_chain, INTERLEAVED, parts_plan(plan))
        assert_as_plain(found, build_checkpointed_chain, 3)


# -- gradients that torch.autograd.grad makes --------------------------------------------------------------------------


class SplitBackwardRunner(ActRunner):
    """Split each backward pass: the gradients of the inputs at once, those of the weights an act later."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._owed: deque[tuple[int, Tensor, Tensor | None]] = deque()

    def backward(self, stage: int, micro_batch: int) -> None:
        output, seed = self.seed(stage, micro_batch)
        if stage:
            x = self._inputs[stage, micro_batch]
            (x.grad,) = torch.autograd.grad(output, x, seed, retain_graph=True)
        self._owed.append((stage, output, seed))
        if len(self._owed) > 1:
            self.weights()

    def weights(self) -> None:
        stage, output, seed = self._owed.popleft()
        passes = engine_of(self._model).passes
        parameters = [p for p in (*self._model.stages[stage].parameters(), self._model.tied) if p is not None]
        parameters = [p for p in parameters if p.requires_grad]
        with passes.part(stage):
            gradients = torch.autograd.grad(output, parameters, seed, allow_unused=True)
        passes.take_gradients(stage, dict(zip(parameters, gradients, strict=True)))

    def finish(self) -> None:
        while self._owed:
            self.weights()


@pytest.mark.parametrize("make", [build_tied_chain, build_frozen_chain])
@pytest.mark.parametrize("plan", PLANS)
def test_gradients_that_were_taken_are_those_of_backward(make: Make, plan: str) -> None:
    whole, split = (
        train_parts(make, INTERLEAVED, parts_plan(plan), runner=runner) for runner in (ActRunner, SplitBackwardRunner)
    )
    for one, other in zip(whole, split, strict=True):
        assert_same_bits(one.state, other.state)
        assert torch.equal(one.losses, other.losses)
        assert one.report.bytes_sent["reduce_scatter"] == other.report.bytes_sent["reduce_scatter"]


# -- when R3 runs ------------------------------------------------------------------------------------------------------


def launched_in_acts(make: Make, runner: type[ActRunner], steps: int = 2) -> list[tuple[int, str]]:
    """Return the last step's acts by number, and the units with R3 launched inside; at the boundary: after all."""
    with observe.recording(Events()) as sink:
        train_parts(make, INTERLEAVED, parts_plan("zero1"), runner=runner, steps=steps)
    events = [event for event in sink.events if isinstance(event, (Span, Instant)) and event.rank == 0]
    events.sort(key=lambda event: event.begin_s if isinstance(event, Span) else event.at_s)
    acts, found = 0, []
    for event in events:
        acts += event.category == "act"
        if event.category == "launch reduction":
            found.append((acts, event.name.partition("[")[0]))
    before = acts - len(INTERLEAVED)
    return [(act - before - 1, name) for act, name in found if act > before]


class PassError(RuntimeError):
    """The error of a pass."""


class FailingRunner(ActRunner):
    """In the second step fail once before the real pass: in a forward or a backward of the second part."""

    def __init__(self, model: nn.Module, rank: int, step: int) -> None:
        super().__init__(model, rank, step)
        if step == 1:
            self.fail(model)
            attempt = ActRunner(model, rank, step)
            with pytest.raises(PassError):
                for act in INTERLEAVED:
                    attempt.act(act)
            self._handle.remove()
            model.zero_grad()

    def fail(self, model: nn.Module) -> None:
        self._handle = model.stages[1][0].register_forward_hook(raise_second_time())


class FailingBackwardRunner(FailingRunner):
    def fail(self, model: nn.Module) -> None:
        self._handle = model.stages[1][0].inner.weight.register_hook(raise_second_time())


def raise_second_time() -> Callable[..., None]:
    """A hook that raises when it is called for the second time."""
    times = count(1)

    def hook(*_: object) -> None:
        if next(times) == 2:
            raise PassError

    return hook


@pytest.mark.parametrize("runner", [ActRunner, FailingRunner, FailingBackwardRunner])
def test_the_last_pass_of_a_part_sums_its_gradients_and_the_last_of_all_the_roots(runner: type[ActRunner]) -> None:
    blocks = [f"stages.{stage}.{block}" for stage in (1, 0) for block in (1, 0)]
    last = [(10, blocks[0]), (10, blocks[1]), (11, blocks[2]), (11, blocks[3])]
    assert INTERLEAVED[10:] == [B1, B0]
    assert launched_in_acts(build_tied_chain, runner) == [*last, (11, "root")]
    assert launched_in_acts(build_tied_chain, ActRunner, steps=1) == [(11, name) for name in (*blocks, "root")], (
        "at the boundary"
    )


@pytest.mark.parametrize("runner", [FailingRunner, FailingBackwardRunner])
@pytest.mark.parametrize("plan", ["zero0", "zero2", "zero3", "zero3 within the step"])
def test_training_goes_on_after_an_exception(runner: type[ActRunner], plan: str) -> None:
    found, without = (
        train_parts(build_tied_chain, INTERLEAVED, parts_plan(plan), runner=each) for each in (runner, ActRunner)
    )
    for each, expected in zip(found, without, strict=True):
        assert_same_bits(each.state, expected.state)


# -- what else there is ------------------------------------------------------------------------------------------------


class NoSyncRunner(ActRunner):
    """All passes of the first two micro-batches add up on each rank."""

    def act(self, act: Act) -> None:
        with npuzero.no_sync(self._model) if self._done[act] < 2 else nullcontext():
            super().act(act)


def test_no_sync() -> None:
    for plan in PLANS:
        found = train_parts(build_tied_chain, INTERLEAVED, parts_plan(plan), runner=NoSyncRunner)
        assert_as_plain(found, build_tied_chain, 3)


def test_updates_that_begin_in_the_last_backward_pass() -> None:
    plan = parts_plan("zero2").offloaded("host")
    late, early = (
        train_parts(build_tied_chain, INTERLEAVED, plan, optimizer=partial(npuzero.AdamW, early=early), steps=4)
        for early in (False, True)
    )
    for one, other in zip(late, early, strict=True):
        assert_same_bits(one.state, other.state)


def test_a_finite_guard_names_the_stage() -> None:
    def rank(world: World) -> None:
        model = npuzero.zero(build_seeded_model(make=StageChain), 2, world=world, units=PartBlock)
        engine_of(model).passes.divide([["stages.0"], ["stages.1"]])
        optimizer = SGD(model.parameters(), lr=0.1)
        with npuzero.FiniteGuard(model) as guard:
            for step in range(3):
                handle = model.stages[1][0].register_forward_hook(lambda *_: _[-1] / 0.0) if step == 1 else None
                run = ActRunner(model, world.rank, step)
                if step == 2:
                    with pytest.raises(npuzero.NonFiniteError, match=r"stages\.1\.0"):
                        run.act(F0)
                    break
                for act in INTERLEAVED:
                    run.act(act)
                guard.check(torch.stack(run.losses).sum())
                optimizer.step()
                optimizer.zero_grad()
                if handle is not None:
                    handle.remove()

    comm.run_threads(SIZE, rank)


def test_what_does_not_fit_is_refused() -> None:
    def rank(world: World) -> None:
        model = npuzero.zero(build_seeded_model(make=StageChain), 2, world=world, units=PartBlock)
        passes = engine_of(model).passes
        with pytest.raises(ConfigError, match=r"unit 'stages\.1\.0'"):
            passes.divide([[model.stages[0]]])
        passes.divide([[model.stages[0]], [model.stages[1]]])
        output = model(1, model(0, draw_part_input(0, 0, world.rank)))
        with passes.part(1), pytest.raises(StateError, match=r"gradients of unit 'stages\.0\.1'"):
            output.sum().backward()
        model.zero_grad()
        weight = model.stages[0][0].inner.weight
        for number, gradient in ((1, torch.zeros(2 * WIDTH, WIDTH)), (0, torch.zeros(WIDTH))):
            with pytest.raises(ConfigError, match=f"take_gradients, part {number}"):
                passes.take_gradients(number, {weight: gradient})

    comm.run_threads(SIZE, rank)
    for wrong in (
        {"acts": [F1]},
        {"parts": [["stages"]]},
        {"acts": [(2, False)], "parts": [["stages.0"], ["stages.1"]]},
    ):
        with pytest.raises(ConfigError, match="predict: acts"):
            npuzero.predict(StageChain(), "zero2", SIZE, units=PartBlock, **wrong)
