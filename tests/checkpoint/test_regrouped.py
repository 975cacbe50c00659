"""An optimizer with other groups than the checkpoint: states follow the parameters' names."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR

import npuzero
from checkpoint.training import State, checkpoint_loss, global_batch_tokens
from npuzero import CheckpointError, checkpoint, comm
from npuzero.comm import World
from world.toy import build_seeded_model
from world.train import assert_same_bits

Groups = Callable[[Sequence[nn.Parameter]], list[dict[str, Any]]]


def single_group(parameters: Sequence[nn.Parameter]) -> list[dict[str, Any]]:
    return [{"params": [*parameters]}]


def two_split_groups(parameters: Sequence[nn.Parameter]) -> list[dict[str, Any]]:
    return [{"params": [*parameters[3:]]}, {"params": [*parameters[:3]]}]


def alternating_groups(parameters: Sequence[nn.Parameter]) -> list[dict[str, Any]]:
    return [{"params": [*parameters[::2]]}, {"params": [*parameters[1::2]]}]


class RegroupedRun:
    """Build a model and its optimizer; parameters of ``frozen`` do not train."""

    def __init__(self, world: World, plan: str, groups: Groups, frozen: Sequence[str] = ()) -> None:
        self.world = world
        model = build_seeded_model(0)
        for name in frozen:
            model.get_parameter(name).requires_grad_(False)
        self.model = npuzero.zero(model, plan=plan, world=world)
        self.names = {id(p): name for name, p in self.model.named_parameters()}
        self.optimizer = npuzero.AdamW(groups([p for p in self.model.parameters() if p.requires_grad]), lr=1e-2)

    def steps(self, begin: int, end: int) -> None:
        for step in range(begin, end):
            checkpoint_loss(self.model, global_batch_tokens(step).chunk(self.world.size)[self.world.rank]).backward()
            self.optimizer.step()
            self.optimizer.zero_grad()

    def states(self) -> State:
        parameters = [p for group in self.optimizer.param_groups for p in group["params"]]
        found = self.optimizer.state_dict()["state"]
        named = {self.names[id(parameters[number])]: state for number, state in found.items()}
        return {f"{name}.{key}": value for name, state in named.items() for key, value in state.items()}

    def weights(self) -> State:
        return npuzero.full_state_dict(self.model, rank0_only=False)


@pytest.mark.parametrize(
    "before, after",
    [(single_group, two_split_groups), (two_split_groups, single_group), (two_split_groups, alternating_groups)],
    ids=lambda g: g.__name__,
)
@pytest.mark.parametrize("plan", ["zero1", "zero3"])
def test_a_run_goes_on_to_the_bit_with_its_parameters_in_other_groups(
    plan: str, before: Groups, after: Groups, tmp_path: Path
) -> None:
    """Rank 0 alone warns, once, and names the groups that keep the program's hyperparameters."""

    def rank(world: World) -> None:
        run = RegroupedRun(world, plan, before)
        run.steps(0, 2)
        checkpoint.save(tmp_path, run.model, run.optimizer, step=2)
        run.steps(2, 4)
        other = RegroupedRun(world, plan, after)
        assert checkpoint.load(tmp_path, other.model, other.optimizer).step == 2
        other.steps(2, 4)
        assert_same_bits(other.weights(), run.weights())
        assert_same_bits(other.states(), run.states())

    with pytest.warns(UserWarning, match="groups of other parameters, .* the program's hyperparameters: 0") as told:
        comm.run_threads(2, rank)
    assert len(told) == 1


def test_what_was_frozen_since_is_left_out_and_the_rest_goes_on(tmp_path: Path) -> None:
    """The saved group continues without them, with its hyperparameters. Unfrozen again, they start with no state."""
    first = "tokens.weight"

    def rank(world: World) -> None:
        run = RegroupedRun(world, "zero3", single_group)
        run.steps(0, 2)
        run.optimizer.param_groups[0]["lr"] = 3e-3
        checkpoint.save(tmp_path, run.model, run.optimizer, step=2)
        fewer = RegroupedRun(world, "zero3", single_group, frozen=[first])
        checkpoint.load(tmp_path, fewer.model, fewer.optimizer)
        assert fewer.optimizer.param_groups[0]["lr"] == 3e-3
        assert_same_bits(fewer.weights(), run.weights())
        kept = {key: value for key, value in run.states().items() if not key.startswith(f"{first}.")}
        assert kept and len(kept) < len(run.states())
        assert_same_bits(fewer.states(), kept)
        fewer.steps(2, 3)
        checkpoint.save(tmp_path, fewer.model, fewer.optimizer, step=3)
        run = RegroupedRun(world, "zero3", single_group)
        checkpoint.load(tmp_path, run.model, run.optimizer)
        assert_same_bits(run.states(), fewer.states())
        run.steps(3, 4)
        assert f"{first}.exp_avg" in run.states()

    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always", UserWarning)
        comm.run_threads(2, rank)
    texts = [str(each.message) for each in told if "load" in str(each.message)]
    assert len(texts) == 2
    assert f"does not have parameters whose saved states are left out: {first}." in texts[0]
    assert f"parameters without a saved state, which begin without one: {first}." in texts[1]


@pytest.mark.parametrize(
    "after", [two_split_groups, lambda p: two_split_groups(p)[::-1]], ids=["in order", "in another order"]
)
def test_a_scheduler_has_the_rates_of_the_groups_there_are_now(after: Groups, tmp_path: Path) -> None:
    """Return these rates where the groups match saved groups, and the program's elsewhere."""

    def halved(optimizer: torch.optim.Optimizer) -> LambdaLR:
        return LambdaLR(optimizer, lambda step: 0.5**step)

    def rate_by_group(parameters: Sequence[nn.Parameter]) -> list[dict[str, Any]]:
        return [{**group, "lr": 8.0 * len(group["params"])} for group in two_split_groups(parameters)]

    def rank(world: World) -> None:
        run = RegroupedRun(world, "zero2", rate_by_group)
        schedule = halved(run.optimizer)
        schedule.step()
        checkpoint.save(tmp_path / "same", run.model, run.optimizer, scheduler=schedule, step=1)
        other = RegroupedRun(world, "zero2", after)
        schedule = halved(other.optimizer)
        checkpoint.load(tmp_path / "same", other.model, other.optimizer, scheduler=schedule)
        schedule.step()
        for group in other.optimizer.param_groups:
            assert group["lr"] == schedule.get_last_lr()[other.optimizer.param_groups.index(group)]
            assert group["lr"] == 2.0 * len(group["params"])
        merged = RegroupedRun(world, "zero2", single_group)
        schedule = halved(merged.optimizer)
        checkpoint.load(tmp_path / "same", merged.model, merged.optimizer, scheduler=schedule)
        schedule.step()
        assert schedule.get_last_lr() == [merged.optimizer.param_groups[0]["lr"]] == [1e-2 / 4]

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        comm.run_threads(2, rank)


def test_parameters_of_other_names_are_refused(tmp_path: Path) -> None:
    """Save a checkpoint of an optimizer over other parts of the model."""

    def rank(world: World) -> None:
        run = RegroupedRun(world, "zero3", lambda parameters: single_group(parameters[:3]))
        run.steps(0, 1)
        checkpoint.save(tmp_path, run.model, run.optimizer, step=1)
        other = RegroupedRun(world, "zero3", lambda parameters: single_group(parameters[3:]))
        with pytest.raises(CheckpointError, match="states of parameters of the optimizer; got missing"):
            checkpoint.load(tmp_path, other.model, other.optimizer)

    comm.run_threads(2, rank)
