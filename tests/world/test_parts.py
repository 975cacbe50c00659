"""Parts of a model that run forward and backward by themselves, as a pipeline rank's stages do, in any order."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache, partial
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

import npuzero
from npuzero import Placement, Plan, Report, comm
from npuzero.api.model import engine_of
from npuzero.comm import World
from world.toy import build
from world.train import BOUND, State, assert_close, assert_same_bits

SIZE, WIDTH = 2, 8
#: One move of a part: its number, and whether it is a backward pass. Each part's run in order of their micro-batches.
Act = tuple[int, bool]
Make = Callable[[], nn.Module]
F0, B0, F1, B1 = (0, False), (0, True), (1, False), (1, True)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, 2 * WIDTH)
        self.out = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.out(torch.tanh(self.inner(x)))


class Chain(nn.Module):
    """Stages of blocks, each called by its number; the root owns nothing, or what the outermost stages share."""

    def __init__(self, stages: int = 2, blocks: int = 2, tied: bool = False) -> None:
        super().__init__()
        self.stages = nn.ModuleList(nn.ModuleList(Block() for _ in range(blocks)) for _ in range(stages))
        self.tied = nn.Parameter(torch.randn(WIDTH, WIDTH) / 3) if tied else None

    def forward(self, stage: int, x: Tensor) -> Tensor:
        if stage == 0 and self.tied is not None:
            x = x @ self.tied
        for block in self.stages[stage]:
            x = block(x)
        if stage == len(self.stages) - 1 and self.tied is not None:
            x = x @ self.tied.T
        return x


def tied() -> Chain:
    return Chain(tied=True)


def one() -> Chain:
    return Chain(stages=1, blocks=3)


def one_f_one_b(micro_batches: int, ahead: int = 2) -> list[Act]:
    """F0 F1 B0 F2 B1 ...: of one part, of which ``ahead`` forwards run before the first backward."""
    ahead = min(ahead, micro_batches)
    return [F0] * ahead + [B0, F0] * (micro_batches - ahead) + [B0] * ahead


#: Two parts in turns, with three micro-batches.
INTERLEAVED = [F0, F0, F1, B1, F1, B0, F0, B1, F1, B0, B1, B0]
GPIPE = [F0, F0, F0, F1, F1, F1, B1, B1, B1, B0, B0, B0]


def data_of(step: int, micro_batch: int, rank: int) -> Tensor:
    generator = torch.Generator().manual_seed(1000 * step + 10 * micro_batch + rank)
    return torch.randn(3, WIDTH, generator=generator)


class Runner:
    """Run acts, each part's output the next one's input, and the last one's the loss.

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
        micro_batch = self._done[act]
        self._done[act] += 1
        with engine_of(self._model).passes.part(act[0]):
            self.backward(act[0], micro_batch) if act[1] else self.forward(act[0], micro_batch)

    def forward(self, stage: int, micro_batch: int) -> None:
        at = stage, micro_batch
        if stage:
            self._inputs[at] = self._outputs[stage - 1, micro_batch].detach().requires_grad_()
        else:
            self._inputs[at] = data_of(self._step, micro_batch, self._rank)
        output = self._model(stage, self._inputs[at])
        if stage == self._last:
            output = output.square().mean()
            self.losses.append(output.detach())
        self._outputs[at] = output

    def seed(self, stage: int, micro_batch: int) -> tuple[Tensor, Tensor | None]:
        """The output that a backward pass begins at, and its gradient."""
        return self._outputs.pop((stage, micro_batch)), None if stage == self._last else self._inputs.pop(
            (stage + 1, micro_batch)
        ).grad

    def backward(self, stage: int, micro_batch: int) -> None:
        torch.autograd.backward(*self.seed(stage, micro_batch))


#: Each rank's optimizer.
SGD = partial(npuzero.ZeroOptimizer, torch.optim.SGD)


class Trained(NamedTuple):
    """What a rank has in the end."""

    state: State
    losses: Tensor
    report: Report


def trained(
    make: Make,
    acts: Sequence[Act],
    plan: Plan,
    *,
    runner: type[Runner] = Runner,
    optimizer: Callable[..., Any] = SGD,
    lr: float = 0.1,
    steps: int = 3,
    **options: Any,
) -> list[Trained]:
    """Train by ``acts`` on each rank."""

    def rank(world: World) -> Trained:
        model = npuzero.zero(build(make=make), plan=plan, world=world, units=Block, **options)
        stages = len(model.stages)
        if stages > 1:
            engine_of(model).passes.divide([[stage] for stage in model.stages])
        update = optimizer(model.parameters(), lr=lr)
        losses = []
        for step in range(steps):
            run = runner(model, world.rank, step)
            for act in acts:
                run.act(act)
            update.step()
            update.zero_grad()
            losses += run.losses
        state = npuzero.full_state_dict(model, rank0_only=False)
        return Trained(
            {name: value.clone() for name, value in state.items()}, torch.stack(losses), npuzero.report(model)
        )

    return comm.run_threads(SIZE, rank)


@cache
def plain(make: Make, micro_batches: int, lr: float = 0.1, steps: int = 3) -> tuple[State, Tensor]:
    """What plain torch makes of all ranks' data: the state, and each rank's losses."""
    model = build(make=make)
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    losses = []
    for step in range(steps):
        for micro_batch in range(micro_batches):
            of_ranks = []
            for rank in range(SIZE):
                x = data_of(step, micro_batch, rank)
                for stage in range(len(model.stages)):
                    x = model(stage, x)
                of_ranks.append(x.square().mean())
            torch.stack(of_ranks).mean().backward()
            losses.append(torch.stack(of_ranks).detach())
        optimizer.step()
        optimizer.zero_grad()
    return {name: value.detach().clone() for name, value in model.state_dict().items()}, torch.stack(losses)


def assert_as_plain(found: Sequence[Trained], make: Make, micro_batches: int) -> None:
    state, losses = plain(make, micro_batches)
    for rank, each in enumerate(found):
        assert_same_bits(each.state, found[0].state)
        assert_close(each.state, state, BOUND)
        torch.testing.assert_close(each.losses, losses[:, rank], rtol=BOUND, atol=0)


CASES = [
    *(pytest.param(one, one_f_one_b(m), m, id=f"one part, {m} micro-batches") for m in (1, 3, 4)),
    pytest.param(Chain, INTERLEAVED, 3, id="two parts interleaved"),
    pytest.param(Chain, GPIPE, 3, id="two parts, all forwards first"),
    pytest.param(tied, INTERLEAVED, 3, id="two parts that share a parameter"),
]
#: The first three sum gradients of micro-batches on each rank first, the others over the ranks first: in each of the two
#: orders all plans agree in all bits.
PLANS = ("zero0", "zero1", "zero1.5", "zero2", "zero3", "zero3 within the step")
ALIKE = (PLANS[:3], PLANS[3:])


def plan_of(name: str, precision: str = "fp32") -> Plan:
    row, _, kept = name.partition(" ")
    plan = Plan.preset(row, local_size=1, precision=precision)
    return replace(plan, between=Placement()) if kept else plan


@pytest.mark.parametrize(("make", "acts", "micro_batches"), CASES)
def test_training_equals_plain_torch(make: Make, acts: list[Act], micro_batches: int) -> None:
    for plans in ALIKE:
        found = [trained(make, acts, plan_of(plan)) for plan in plans]
        for each in found:
            assert_as_plain(each, make, micro_batches)
            assert_same_bits(each[0].state, found[0][0].state)


PLACED = (*PLANS, "hpz", "hpz within the step", "mics", "hsdp")


@pytest.mark.parametrize(("make", "acts", "micro_batches"), CASES)
def test_what_is_sent_and_held_is_foretold(make: Make, acts: list[Act], micro_batches: int) -> None:
    for name in PLACED:
        for precision in ("fp32", "bf16"):
            plan = plan_of(name, precision)
            parts = [[f"stages.{i}"] for i in range(len(make().stages))]
            expected = npuzero.predict(make(), plan, SIZE, units=Block, acts=acts, parts=parts, moments=0)
            for _, _, report in trained(make, acts, plan):
                assert report.bytes_sent == expected.bytes_sent, (name, precision)
                assert report.held == expected.held, (name, precision)
