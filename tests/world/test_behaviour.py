"""Training loops as users write them: a sharded model allows everything that torch's autograd and optimizers allow.

Each scenario runs by plain torch and by npuzero, and must leave the same model.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import pytest
import torch
from torch import nn

import npuzero
from world.toy import ToyBlock, ToyGPT, toy_loss, toy_tokens
from world.train import Session, State, check_equals_plain

#: Plans that use every rule of the table; `make test-all` runs the remaining plans.
PLANS = ("zero1", "zero3", "hpz", "hsdp")
every_plan = pytest.mark.parametrize(
    "plan", [pytest.param(plan, marks=() if plan in PLANS else pytest.mark.slow) for plan in npuzero.PRESETS]
)


def run_adamw_steps(session: Session, passes: Callable[[int], None], count: int = 3) -> None:
    """Take ``count`` steps of AdamW after the backward passes of ``passes(step)``."""
    optimizer = session.optimizer(torch.optim.AdamW, lr=1e-2)
    for step in range(count):
        passes(step)
        optimizer.step()
        optimizer.zero_grad()


# -- forward and backward passes ---------------------------------------------------------------------------------------


def several_forwards_before_one_backward(session: Session) -> None:
    run_adamw_steps(session, lambda step: (session.loss(step, 0) + session.loss(step, 1)).backward())


def two_backwards_over_two_forwards(session: Session) -> None:
    def passes(step: int) -> None:
        first, second = session.loss(step, 0), session.loss(step, 1)
        first.backward()
        second.backward()

    run_adamw_steps(session, passes)


def the_later_forward_first(session: Session) -> None:
    def passes(step: int) -> None:
        first, second = session.loss(step, 0), session.loss(step, 1)
        second.backward()
        first.backward()

    run_adamw_steps(session, passes)


def twice_through_one_graph(session: Session) -> None:
    def passes(step: int) -> None:
        loss = session.loss(step)
        loss.backward(retain_graph=True)
        loss.backward()

    run_adamw_steps(session, passes)


def a_forward_that_nobody_follows(session: Session) -> None:
    def passes(step: int) -> None:
        session.loss(step, 1)
        session.loss(step, 0).backward()
        session.loss(step, 2)

    run_adamw_steps(session, passes)


def micro_batches_that_change_in_number(session: Session) -> None:
    def passes(step: int) -> None:
        for micro_batch in range((1, 3, 2, 1, 4)[step]):
            session.loss(step, micro_batch).backward()

    run_adamw_steps(session, passes, 5)


def evaluation_between_steps(session: Session) -> State:
    seen = []

    def evaluate() -> None:
        session.model.eval()
        with torch.no_grad():
            seen.append(toy_loss(session.model, toy_tokens(77, 0, 0)))
        with torch.inference_mode():
            seen.append(toy_loss(session.model, toy_tokens(78, 0, 0)).clone())
        session.model.train()

    def passes(step: int) -> None:
        before = session.state()
        evaluate()
        assert all(torch.equal(value, before[name]) for name, value in session.state().items())
        session.loss(step).backward()
        evaluate()

    run_adamw_steps(session, passes)
    return {"losses": torch.stack(seen)}


def evaluation_between_forward_and_backward(session: Session) -> None:
    def passes(step: int) -> None:
        loss = session.loss(step)
        with torch.no_grad():
            session.loss(step, 1)
        loss.backward()

    run_adamw_steps(session, passes)


def gradients_of_a_loss_by_autograd_grad(session: Session) -> State:
    """Called by hand, before, between and after backward passes: .grad is unchanged."""
    norms = []

    def look(step: int) -> None:
        parameters = [session.model.blocks[0].out.weight, session.model.scale]
        found = torch.autograd.grad(toy_loss(session.model, toy_tokens(step, 3, 0)), parameters)
        norms.extend(gradient.norm() for gradient in found)

    def passes(step: int) -> None:
        look(step)
        session.loss(step, 0).backward()
        look(step)
        session.loss(step, 1).backward()
        look(step)

    run_adamw_steps(session, passes)
    return {"norms": torch.stack(norms)}


def units_unused_in_some_steps(session: Session) -> None:
    chosen = ((2,), (0, 1, 2), (0, 2), (1,))
    run_adamw_steps(session, lambda step: session.loss(step, blocks=chosen[step]).backward(), len(chosen))


def units_in_another_order_each_time(session: Session) -> None:
    run_adamw_steps(
        session,
        lambda step: session.loss(step, blocks=[(0, 1, 2), (2, 0, 1), (2, 2, 1, 0), (1, 0)][step]).backward(),
        4,
    )


def branches_that_differ_between_ranks(session: Session) -> None:
    """As under DDP: a parameter used on any rank has a gradient on all; unused ones count as zero."""

    def passes(step: int) -> None:
        for micro_batch in range(2):

            def loss(rank: int, micro_batch: int = micro_batch) -> torch.Tensor:
                branches = [(0, 1, 0), (1, 1, 0), (0, 0, 0), (2, 1, 2)][(rank + step + micro_batch) % 4]
                return toy_loss(session.model, toy_tokens(step, micro_batch, rank), branches=branches)

            session.mean(loss).backward()

    run_adamw_steps(session, passes)


def units_that_differ_between_ranks(session: Session) -> None:
    """Where no unit is gathered, ranks may even run different ones."""

    def passes(step: int) -> None:
        for micro_batch in range(2):

            def loss(rank: int, micro_batch: int = micro_batch) -> torch.Tensor:
                blocks = [(0, 1, 2), (2,), (0,), ()][(rank + step + micro_batch) % 4]
                return toy_loss(session.model, toy_tokens(step, micro_batch, rank), blocks=blocks)

            session.mean(loss).backward()

    run_adamw_steps(session, passes)


def ranks_without_a_batch(session: Session) -> None:
    """Where no unit is all-gathered, a rank without work in a step need not call anything."""

    def passes(step: int) -> None:
        losses = [toy_loss(session.model, toy_tokens(step, 0, rank)) for rank in session.ranks if rank != step]
        if losses:
            (torch.stack(losses).sum() / len(session.ranks)).backward()

    run_adamw_steps(session, passes)


# -- without synchronization -------------------------------------------------------------------------------------------


def no_sync_until_the_last_micro_batch(session: Session) -> None:
    def passes(step: int) -> None:
        with session.no_sync():
            session.loss(step, 0).backward()
            session.loss(step, 1).backward()
        session.loss(step, 2).backward()

    run_adamw_steps(session, passes)


def no_sync_up_to_the_step(session: Session) -> None:
    def passes(step: int) -> None:
        with session.no_sync():
            session.loss(step, 0).backward()
            session.loss(step, 1).backward()

    run_adamw_steps(session, passes)


def no_sync_now_and_then(session: Session) -> None:
    def passes(step: int) -> None:
        session.loss(step, 0).backward()
        if step % 2:
            with session.no_sync():
                session.loss(step, 1).backward()
            session.loss(step, 2, blocks=(0, 2)).backward()

    run_adamw_steps(session, passes, 4)


# -- gradients that are dropped, kept and clipped ----------------------------------------------------------------------


def zero_grad_of_the_model(session: Session) -> None:
    optimizer = session.optimizer(torch.optim.AdamW, lr=1e-2)
    for step in range(3):
        session.model.zero_grad()
        session.loss(step).backward()
        optimizer.step()


def zeros_instead_of_none(session: Session) -> None:
    """Of the model, of its parent module, of each submodule, and written out."""

    def written_out() -> None:
        for parameter in session.model.parameters():
            if parameter.grad is not None:
                parameter.grad.detach_()
                parameter.grad.zero_()

    def of_each_part() -> None:
        for part in session.model.children():
            part.zero_grad(set_to_none=False)
        session.model.zero_grad(set_to_none=False)

    optimizer = session.optimizer(torch.optim.AdamW, lr=1e-2)
    outer = nn.ModuleList([session.model])
    model_zeros = partial(session.model.zero_grad, set_to_none=False)
    for step, zero in enumerate((model_zeros, partial(outer.zero_grad, set_to_none=False), of_each_part, written_out)):
        session.loss(step).backward()
        if step % 2:
            session.clip(0.5)
        optimizer.step()
        zero()
        session.loss(step).backward()
        zero()


def steps_that_zero_nothing(session: Session) -> None:
    """Gradients go on accumulating, as in torch."""
    optimizer = session.optimizer(torch.optim.AdamW, lr=1e-2)
    for step in range(4):
        session.loss(step).backward()
        optimizer.step()


def gradients_that_are_dropped_unused(session: Session) -> None:
    optimizer = session.optimizer(torch.optim.AdamW, lr=1e-2)
    for step in range(3):
        session.loss(step, 1).backward()
        optimizer.zero_grad()
        session.loss(step, 0).backward()
        optimizer.step()
        optimizer.zero_grad()


def some_gradients_that_are_dropped(session: Session) -> State:
    norms = []

    def passes(step: int) -> None:
        session.loss(step, 0).backward()
        session.model.blocks[1].out.weight.grad = None
        session.model.tokens.weight.grad = None
        session.loss(step, 1, blocks=(1,)).backward()
        session.model.scale.grad = None
        session.model.blocks[0].qkv.weight.grad = None
        norms.append(session.clip(0.5))

    run_adamw_steps(session, passes)
    return {"norms": torch.stack(norms)}


def some_gradients_that_are_kept(session: Session) -> None:
    """Only a part of the model is zeroed after each step, while its use moves from rank to rank."""
    optimizer = session.optimizer(torch.optim.AdamW, lr=1e-2)
    for step in range(3):

        def loss(rank: int, step: int = step) -> torch.Tensor:
            branches = (0, 1, 0) if rank == step % 2 else (0, 2, 0)
            return toy_loss(session.model, toy_tokens(step, 0, rank), branches=branches)

        session.mean(loss).backward()
        optimizer.step()
        for name, parameter in session.model.named_parameters():
            if name.startswith("blocks.1"):
                parameter.grad = None


def parameters_left_out_of_some_steps(session: Session) -> None:
    """Each parameter has a separate step count for its bias correction."""

    def passes(step: int) -> None:
        session.loss(step).backward()
        for name, parameter in session.model.blocks[1].named_parameters():
            if step in ({"out.bias": (0, 1), "mlp.1.weight": (2,)}.get(name, ())):
                parameter.grad = None

    run_adamw_steps(session, passes, 4)


def steps_without_gradients(session: Session) -> None:
    optimizer = session.optimizer(torch.optim.AdamW, lr=1e-2)
    optimizer.step()
    for step in range(2):
        session.loss(step).backward()
        optimizer.step()
        optimizer.zero_grad()
        optimizer.step()


def two_steps_over_one_gradient(session: Session) -> None:
    optimizer = session.optimizer(torch.optim.AdamW, lr=1e-2)
    for step in range(2):
        session.loss(step).backward()
        optimizer.step()
        optimizer.step()
        optimizer.zero_grad()


def clipping_and_then_more_gradients(session: Session) -> State:
    norms = []

    def passes(step: int) -> None:
        session.loss(step, 0).backward()
        norms.append(session.clip(0.1))
        session.loss(step, 1).backward()
        norms.append(session.clip(0.2))
        norms.append(session.clip(0.2))

    run_adamw_steps(session, passes)
    return {"norms": torch.stack(norms)}


def clipping_what_is_small(session: Session) -> State:
    norms = []

    def passes(step: int) -> None:
        session.loss(step).backward()
        norms.append(session.clip(1e6))

    run_adamw_steps(session, passes)
    return {"norms": torch.stack(norms)}


def a_closure(session: Session) -> None:
    optimizer = session.optimizer(torch.optim.AdamW, lr=1e-2)
    for step in range(3):
        losses = []

        def closure(step: int = step, losses: list[torch.Tensor] = losses) -> torch.Tensor:
            optimizer.zero_grad()
            losses.append(session.loss(step))
            losses[-1].backward()
            return losses[-1]

        returned = optimizer.step(closure)
        assert [returned] == losses and returned.requires_grad


def autocast_over_float32(session: Session) -> None:
    """Parameters stay float32, their products are computed in bfloat16."""

    def loss(step: int, rank: int) -> torch.Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return toy_loss(session.model, toy_tokens(step, 0, rank))

    run_adamw_steps(session, lambda step: session.mean(lambda rank: loss(step, rank)).backward())


class BranchingBlock(ToyBlock):
    """A model with two more layers, which runs the chosen one, or none."""

    def __init__(self, dim: int, frozen_norm: bool = False) -> None:
        super().__init__(dim, frozen_norm)
        self.branches = nn.ModuleList(nn.Linear(dim, dim) for _ in range(2))

    def forward(self, x: torch.Tensor, branch: int = 0) -> torch.Tensor:
        x = super().forward(x)
        return x + self.branches[branch](x) if branch < len(self.branches) else x


class BranchingGPT(ToyGPT):
    """A model that runs the chosen blocks, and in each the chosen branch."""

    def __init__(self) -> None:
        super().__init__(block=BranchingBlock)

    def forward(
        self, tokens: torch.Tensor, blocks: Sequence[int] = (0, 1, 2), branches: Sequence[int] = (0, 0, 0)
    ) -> torch.Tensor:
        x = self.tokens(tokens) + self.positions
        for i in blocks:
            x = self.blocks[i](x, branch=branches[i])
        return self.head(self.norm(x)) * self.scale


SCENARIOS = (
    several_forwards_before_one_backward,
    two_backwards_over_two_forwards,
    the_later_forward_first,
    twice_through_one_graph,
    a_forward_that_nobody_follows,
    micro_batches_that_change_in_number,
    evaluation_between_steps,
    evaluation_between_forward_and_backward,
    gradients_of_a_loss_by_autograd_grad,
    units_unused_in_some_steps,
    units_in_another_order_each_time,
    branches_that_differ_between_ranks,
    no_sync_until_the_last_micro_batch,
    no_sync_up_to_the_step,
    no_sync_now_and_then,
    zero_grad_of_the_model,
    zeros_instead_of_none,
    steps_that_zero_nothing,
    gradients_that_are_dropped_unused,
    some_gradients_that_are_dropped,
    some_gradients_that_are_kept,
    parameters_left_out_of_some_steps,
    steps_without_gradients,
    two_steps_over_one_gradient,
    clipping_and_then_more_gradients,
    clipping_what_is_small,
    a_closure,
)


@every_plan
@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: scenario.__name__.replace("_", " "))
def test_loops(scenario: Callable[[Session], State | None], plan: str) -> None:
    check_equals_plain(scenario, 4, BranchingGPT, plan=plan, local_size=2)


@pytest.mark.parametrize("plan", ["zero0", "zero1", "zero1.5", "zero2"])
@pytest.mark.parametrize("scenario", [units_that_differ_between_ranks, ranks_without_a_batch])
def test_ranks_may_run_different_units(scenario: Callable[[Session], None], plan: str) -> None:
    check_equals_plain(scenario, 4, BranchingGPT, plan=plan, local_size=2)


@pytest.mark.parametrize("plan", PLANS)
def test_autocast(plan: str) -> None:
    """Products in bfloat16 of float32 parameters: a last bit of these may move a rounding of those."""
    check_equals_plain(autocast_over_float32, 4, BranchingGPT, bound=5e-3, plan=plan, local_size=2)
