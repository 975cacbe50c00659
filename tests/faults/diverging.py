"""Programs that diverge on one rank: each function runs on every rank, and never ends well.

None depends on timing: the ranks end up waiting for each other, and would wait until the timeout.
"""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import npuzero
from npuzero import checkpoint
from npuzero.comm import World
from world.toy import build_seeded_model, toy_loss, toy_tokens

#: The rank that diverges, where it is not rank 0.
CULPRIT = 1


class DivergingRun:
    """Hold a model in training on this rank, with the operations that the loops below call."""

    def __init__(self, world: World, plan: str) -> None:
        self.world = world
        self.model = npuzero.zero(build_seeded_model(), plan=plan, world=world)
        self.optimizer = npuzero.AdamW(self.model.parameters(), lr=1e-3)

    def backward(self, step: int, micro_batch: int = 0) -> None:
        toy_loss(self.model, toy_tokens(step, micro_batch, self.world.rank)).backward()

    def update(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()

    def steps(self, first: int, last: int) -> None:
        for step in range(first, last):
            self.backward(step)
            self.update()


@cache
def _shared_folder() -> Path:
    return Path(tempfile.mkdtemp(prefix="npuzero-test-"))


def only_rank_0(what: Callable[[DivergingRun], object]) -> Callable[[World, str], None]:
    """Take two steps, run ``what`` on rank 0 alone, take two steps."""

    def fault(world: World, plan: str) -> None:
        run = DivergingRun(world, plan)
        run.steps(0, 2)
        if world.rank == 0:
            what(run)
        run.steps(2, 4)

    return fault


def _save_checkpoint(run: DivergingRun) -> None:
    checkpoint.save(_shared_folder() / "run", run.model, run.optimizer, step=2)


def _save_beside(run: DivergingRun) -> None:
    checkpoint.save(_shared_folder() / "run", run.model, run.optimizer, step=2, asynchronous=True).wait()


def _load_checkpoint(run: DivergingRun) -> None:
    checkpoint.load(_shared_folder() / "run", run.model, run.optimizer)


def _export_weights(run: DivergingRun) -> None:
    npuzero.export(run.model, _shared_folder() / "weights")


def _evaluate(run: DivergingRun) -> None:
    with torch.no_grad():
        run.model(toy_tokens(0, 0, 0)[:, :-1])


def _gather_parameters(run: DivergingRun) -> None:
    with npuzero.gathered(run.model):
        sum(float(parameter.detach().sum()) for parameter in run.model.parameters())


def _load_full_state(run: DivergingRun) -> None:
    npuzero.load_full_state_dict(run.model, build_seeded_model().state_dict())


def _state_dict(run: DivergingRun) -> None:
    npuzero.full_state_dict(run.model)


def _optimizer_state(run: DivergingRun) -> None:
    run.optimizer.state_dict()


def _barrier(run: DivergingRun) -> None:
    run.world.communicator(range(run.world.size), "mine").barrier()


def _second_model(run: DivergingRun) -> None:
    npuzero.zero(build_seeded_model(), plan="zero3", world=run.world)


def only_the_culprit(what: Callable[[DivergingRun], object]) -> Callable[[World, str], None]:
    """Run ``what`` on the culprit alone, between backward and the step."""

    def fault(world: World, plan: str) -> None:
        run = DivergingRun(world, plan)
        for step in range(3):
            run.backward(step)
            if world.rank == CULPRIT:
                what(run)
            run.update()

    return fault


def _read_full_gradient(run: DivergingRun) -> None:
    npuzero.full_gradient(run.model.norm.weight)  # type: ignore[union-attr, arg-type]


def skips_a_step(world: World, plan: str) -> None:
    """Skip a backward, as for a nan loss on one rank."""
    run = DivergingRun(world, plan)
    for step in range(4):
        run.backward(step)
        if world.rank == CULPRIT and step == 1:
            run.optimizer.zero_grad()
        else:
            run.update()


def uneven_micro_batches(world: World, plan: str) -> None:
    """Give the culprit's data loader one micro-batch less."""
    run = DivergingRun(world, plan)
    for step in range(3):
        micro_batches = 3 if world.rank == CULPRIT else 4
        for micro_batch in range(micro_batches):
            last = micro_batch == micro_batches - 1
            with contextlib.nullcontext() if last else npuzero.no_sync(run.model):
                run.backward(step, micro_batch)
        run.update()


def goes_on_after_an_exception(world: World, plan: str) -> None:
    """Give the culprit a batch that it cannot read: it takes the next."""
    run = DivergingRun(world, plan)
    for step in range(4):
        try:
            if world.rank == CULPRIT and step == 1:
                raise OSError("a file that cannot be read")
            run.backward(step)
            run.update()
        except OSError:
            continue


def goes_on_after_an_exception_in_forward(world: World, plan: str) -> None:
    """Raise out-of-memory on the culprit for one micro-batch."""
    run = DivergingRun(world, plan)

    def fails(module: nn.Module, inputs: Any) -> None:
        if fails_now:
            raise MemoryError("out of memory")

    fails_now = False
    run.model.blocks[1].register_forward_pre_hook(fails)  # type: ignore[index, union-attr]
    for step in range(4):
        fails_now = world.rank == CULPRIT and step == 1
        with contextlib.suppress(MemoryError):
            run.backward(step)
            run.update()


def cuts_alone(world: World, plan: str) -> None:
    """Shard the model on rank 0 only; the remaining ranks go on to another operation."""
    if world.rank == 0:
        DivergingRun(world, plan)
    world.communicator(range(world.size), "mine").barrier()


def other_order_of_units(world: World, plan: str) -> None:
    """Build a model whose blocks run in another order on the culprit."""

    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.left = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))
            self.right = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))

        def forward(self, x: Tensor) -> Tensor:
            first, second = (self.right, self.left) if world.rank == CULPRIT else (self.left, self.right)
            for block in (*first, *second):
                x = block(x)
            return x

    model = npuzero.zero(build_seeded_model(make=Mixed), plan=plan, world=world)
    optimizer = npuzero.AdamW(model.parameters(), lr=1e-3)
    for _ in range(2):
        model(torch.ones(2, 8)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()


def ends_early(world: World, plan: str) -> None:
    """End the culprit's data first."""
    DivergingRun(world, plan).steps(0, 2 if world.rank == CULPRIT else 4)


def other_presets(world: World, plan: str) -> None:
    run = DivergingRun(world, "zero2" if world.rank == CULPRIT else plan)
    run.steps(0, 2)


def other_channels(world: World, plan: str) -> None:
    world.exchange(world.rank, "evaluation" if world.rank == CULPRIT else "saving")


def one_exchange_more(world: World, plan: str) -> None:
    world.exchange(world.rank)
    if world.rank == CULPRIT:
        world.exchange(world.rank)
    world.communicator(range(world.size), "mine").barrier()


def in_a_ring(world: World, plan: str) -> None:
    """Pair each two neighbours; each rank goes to the rank on its right first."""
    right = (world.rank + 1) % world.size
    for pair in (sorted((world.rank, right)), sorted((world.rank, (world.rank - 1) % world.size))):
        world.communicator(pair, "neighbours").barrier()


def run_case(world: World, case: str, plan: str) -> None:
    CASES[case](world, plan)


CASES: dict[str, Callable[[World, str], None]] = {
    "save on rank 0 only": only_rank_0(_save_checkpoint),
    "asynchronous save on rank 0 only": only_rank_0(_save_beside),
    "load on rank 0 only": only_rank_0(_load_checkpoint),
    "export on rank 0 only": only_rank_0(_export_weights),
    "evaluation on rank 0 only": only_rank_0(_evaluate),
    "gathered() on rank 0 only": only_rank_0(_gather_parameters),
    "full_state_dict on rank 0 only": only_rank_0(_state_dict),
    "optimizer.state_dict on rank 0 only": only_rank_0(_optimizer_state),
    "world.mean on rank 0 only": only_rank_0(lambda run: run.world.mean(1.0)),
    "barrier on rank 0 only": only_rank_0(_barrier),
    "zero() of a second model on rank 0 only": only_rank_0(_second_model),
    "zero() on rank 0 only": cuts_alone,
    "load_full_state_dict on rank 0 only": only_rank_0(_load_full_state),
    "clipping on one rank": only_the_culprit(lambda run: npuzero.clip_grad_norm_(run.model, 1.0)),
    "clipping by value on one rank": only_the_culprit(lambda run: npuzero.clip_grad_value_(run.model, 1.0)),
    "skip_nonfinite_ on one rank": only_the_culprit(lambda run: npuzero.skip_nonfinite_(run.model)),
    "grad_norms on one rank": only_the_culprit(lambda run: npuzero.grad_norms(run.model)),
    "full_gradient on one rank": only_the_culprit(_read_full_gradient),
    "another step on one rank": only_the_culprit(lambda run: run.optimizer.step()),
    "a step left out": skips_a_step,
    "uneven micro-batches": uneven_micro_batches,
    "exception before a batch": goes_on_after_an_exception,
    "exception in a forward": goes_on_after_an_exception_in_forward,
    "another order of units": other_order_of_units,
    "a rank that ends early": ends_early,
    "other presets": other_presets,
    "other channels": other_channels,
    "one exchange more": one_exchange_more,
    "a ring of pairs": in_a_ring,
}
