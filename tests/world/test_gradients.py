"""Gradients from backward to the step, in training loops: none is lost, none returns.

Each scenario runs by plain torch and by npuzero, and must leave the same model.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import npuzero
from npuzero import Settings
from world.test_behaviour import BranchingBlock, BranchingGPT, micro_batches_that_change_in_number, run_adamw_steps
from world.toy import ToyGPT, toy_loss, toy_tokens
from world.train import Session, State, assert_same_bits, check_equals_plain, run_cut

ALL, WITHOUT_1 = (0, 1, 2), (0, 2)
PLANS = ("zero0", "zero1", "zero3", "hsdp")
every_plan = pytest.mark.parametrize(
    "plan", [pytest.param(plan, marks=() if plan in PLANS else pytest.mark.slow) for plan in npuzero.PRESETS]
)


# -- a unit that has its gradient, and is not used again ---------------------------------------------------------------


def a_synchronised_pass_then_no_sync_without_a_unit(session: Session) -> None:
    def passes(step: int) -> None:
        session.loss(step, 0, blocks=ALL).backward()
        with session.no_sync():
            session.loss(step, 1, blocks=WITHOUT_1).backward()

    run_adamw_steps(session, passes)


def two_passes_the_second_without_a_unit(session: Session) -> None:
    def passes(step: int) -> None:
        session.loss(step, 0, blocks=ALL).backward()
        session.clip(0.1)
        session.loss(step, 1, blocks=WITHOUT_1).backward()

    run_adamw_steps(session, passes)


def gradients_kept_over_a_step_and_a_unit_left_out(session: Session) -> None:
    optimizer = session.optimizer(torch.optim.AdamW, lr=1e-2)
    for step in range(3):
        with session.no_sync() if step == 1 else contextlib.nullcontext():
            session.loss(step, blocks=ALL if step == 0 else WITHOUT_1).backward()
        optimizer.step()


# -- passes that the step must see -------------------------------------------------------------------------------------


def no_sync_after_a_synchronised_pass(session: Session) -> None:
    """The later pass counts in this step, and not in the next one."""

    def passes(step: int) -> None:
        session.loss(step, 0).backward()
        with session.no_sync():
            session.loss(step, 1).backward()

    run_adamw_steps(session, passes)


def no_sync_after_clipping(session: Session) -> None:
    def passes(step: int) -> None:
        session.loss(step, 0).backward()
        session.clip(0.1)
        with session.no_sync():
            session.loss(step, 1).backward()

    run_adamw_steps(session, passes)


# -- gradients that are dropped and must not come back -----------------------------------------------------------------


def drop_gradients(session: Session) -> None:
    for module in (session.model.blocks[1], session.model.norm):
        for parameter in module.parameters():
            parameter.grad = None


def dropped_after_no_sync(session: Session) -> None:
    def passes(step: int) -> None:
        with session.no_sync():
            session.loss(step, 0, blocks=ALL).backward()
        drop_gradients(session)
        session.loss(step, 1, blocks=WITHOUT_1).backward()
        session.clip(0.1)  # by the norm of the remaining gradients

    run_adamw_steps(session, passes)


def dropped_after_no_sync_and_used_again_by_one_rank(session: Session) -> None:
    def passes(step: int) -> None:
        with session.no_sync():
            session.loss(step, 0).backward()
        for parameter in session.model.blocks[1].branches[0].parameters():
            parameter.grad = None

        def loss(rank: int) -> torch.Tensor:
            return toy_loss(session.model, toy_tokens(step, 1, rank), branches=(0, 0 if rank == 1 else 1, 0))

        session.mean(loss).backward()

    run_adamw_steps(session, passes)


def dropped_between_two_no_syncs(session: Session) -> None:
    def passes(step: int) -> None:
        for micro_batch, blocks in enumerate((ALL, WITHOUT_1)):
            with session.no_sync():
                session.loss(step, micro_batch, blocks=blocks).backward()
            if micro_batch == 0:
                drop_gradients(session)

    run_adamw_steps(session, passes)


def dropped_before_the_step(session: Session) -> None:
    def passes(step: int) -> None:
        with session.no_sync():
            session.loss(step, 0).backward()
        drop_gradients(session)
        session.clip(0.1)  # by the norm of the remaining gradients

    run_adamw_steps(session, passes)


def dropped_after_clipping(session: Session) -> None:
    """Gradients reduced before the drop are set aside during accumulation, and no dropped one is added again."""

    def passes(step: int) -> None:
        session.loss(step, 0, blocks=ALL).backward()
        session.clip(0.1)
        drop_gradients(session)
        session.loss(step, 1, blocks=WITHOUT_1).backward()
        session.clip(0.1)

    run_adamw_steps(session, passes)


def dropped_while_the_reduced_are_set_aside(session: Session) -> None:
    def passes(step: int) -> None:
        session.loss(step, 0, blocks=ALL).backward()
        session.clip(0.1)
        session.loss(step, 1, blocks=ALL).backward()
        drop_gradients(session)
        session.loss(step, 2, blocks=WITHOUT_1).backward()

    run_adamw_steps(session, passes)


def all_dropped_while_the_reduced_are_set_aside(session: Session) -> None:
    def passes(step: int) -> None:
        session.loss(step, 0).backward()
        session.clip(0.1)
        with session.no_sync():
            session.loss(step, 1).backward()
        session.model.zero_grad()
        session.loss(step, 2).backward()

    run_adamw_steps(session, passes)


def dropped_between_clipping_and_the_step(session: Session) -> State:
    norms = []

    def passes(step: int) -> None:
        session.loss(step).backward()
        norms.append(session.clip(0.1))
        drop_gradients(session)
        norms.append(session.clip(0.05))

    run_adamw_steps(session, passes)
    return {"norms": torch.stack(norms)}


def dropped_by_all_though_few_had_used_them(session: Session) -> State:
    """A rank's dropped contribution is removed from the peers' shards as well."""
    norms = []

    def passes(step: int) -> None:
        def loss(rank: int) -> torch.Tensor:
            branches = (0, 1 if rank == step % 2 else 2, 0)
            return toy_loss(session.model, toy_tokens(step, 0, rank), branches=branches)

        session.mean(loss).backward()
        for parameter in session.model.blocks[1].branches.parameters():
            parameter.grad = None
        norms.append(session.clip(0.1))

    run_adamw_steps(session, passes)
    return {"norms": torch.stack(norms)}


def all_dropped_but_what_one_rank_had_used(session: Session) -> State:
    """Then there is a step to take, also for ranks without a gradient."""
    norms = []

    def passes(step: int) -> None:
        def loss(rank: int) -> torch.Tensor:
            return toy_loss(session.model, toy_tokens(step, 0, rank), branches=(0, 2 * (rank != 1), 0))

        session.mean(loss).backward()
        kept = set(session.model.blocks[1].branches.parameters())
        for parameter in set(session.model.parameters()) - kept:
            parameter.grad = None
        norms.append(session.clip(0.1))

    run_adamw_steps(session, passes)
    return {"norms": torch.stack(norms)}


# -- parameters that are gathered for nothing --------------------------------------------------------------------------


def an_evaluation_that_foresees_another_unit(session: Session) -> None:
    """Between backward and the step a forward leaves an all-gather pending, for a unit that it does not reach."""

    def passes(step: int) -> None:
        session.loss(step, blocks=ALL).backward()
        with torch.no_grad():
            toy_loss(session.model, toy_tokens(9, 0, 0), blocks=ALL)
            toy_loss(session.model, toy_tokens(9, 0, 0), blocks=(0, 1))

    run_adamw_steps(session, passes)


def a_forward_that_stops_early(session: Session) -> None:
    """A forward raises after its first block: the second's pending all-gather must not reach the next step."""

    def passes(step: int) -> None:
        session.loss(step, blocks=ALL).backward()
        with pytest.raises(IndexError):
            session.loss(step, blocks=(0, 9))

    run_adamw_steps(session, passes)


SCENARIOS = (
    a_synchronised_pass_then_no_sync_without_a_unit,
    two_passes_the_second_without_a_unit,
    gradients_kept_over_a_step_and_a_unit_left_out,
    no_sync_after_a_synchronised_pass,
    no_sync_after_clipping,
    dropped_after_no_sync,
    dropped_after_no_sync_and_used_again_by_one_rank,
    dropped_between_two_no_syncs,
    dropped_before_the_step,
    dropped_after_clipping,
    dropped_between_clipping_and_the_step,
    dropped_by_all_though_few_had_used_them,
    all_dropped_but_what_one_rank_had_used,
    dropped_while_the_reduced_are_set_aside,
    all_dropped_while_the_reduced_are_set_aside,
    an_evaluation_that_foresees_another_unit,
    a_forward_that_stops_early,
)


@pytest.mark.checkered
@every_plan
@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: scenario.__name__.replace("_", " "))
def test_gradients(scenario: Callable[[Session], State | None], plan: str) -> None:
    check_equals_plain(scenario, 4, BranchingGPT, plan=plan, local_size=2)


@pytest.mark.parametrize("plan", ["zero0", "zero3"])
def test_one_rank_alone(plan: str) -> None:
    check_equals_plain(two_passes_the_second_without_a_unit, 1, BranchingGPT, plan=plan)


@pytest.mark.parametrize("plan", ["zero0", "zero1", "zero1.5", pytest.param("hsdp", marks=pytest.mark.slow)])
def test_overlap_moves_no_bit_where_micro_batches_change_in_number(plan: str) -> None:
    """The last micro-batch of a step is predicted from the step before, with overlap and without."""
    beside, alone = (
        run_cut(micro_batches_that_change_in_number, 4, plan=plan, local_size=2, settings=Settings(overlap=overlap))[0]
        for overlap in (True, False)
    )
    assert_same_bits(beside, alone)


class ReentrantBlock(BranchingBlock):
    """Recompute its forward in backward, which finishes its parameters' gradients once per call."""

    def forward(self, x: torch.Tensor, branch: int = 0) -> torch.Tensor:
        y: torch.Tensor = checkpoint(super().forward, x, branch, use_reentrant=True)
        return y


class ReentrantBranchingGPT(BranchingGPT):
    def __init__(self) -> None:
        ToyGPT.__init__(self, block=ReentrantBlock)


@pytest.mark.parametrize("bucket_bytes", [1, 2**20])
@every_plan
def test_a_unit_that_reentrant_checkpointing_runs_twice(plan: str, bucket_bytes: int) -> None:
    def scenario(session: Session) -> None:
        run_adamw_steps(session, lambda step: session.loss(step, blocks=(0, 1, 1, 0, 2)).backward())

    check_equals_plain(scenario, 2, ReentrantBranchingGPT, plan=plan, settings=Settings(bucket_bytes=bucket_bytes))
