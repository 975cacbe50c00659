"""A forward that raises: the program may catch it and continue, and no unit stays gathered."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import npuzero
from npuzero import StateError, comm
from npuzero.comm import World
from world.toy import build_seeded_model, toy_tokens
from world.train import BOUND, relative_difference

PLANS = ("zero0", "zero2", "zero3", "zero3-keep", "hpz", "hsdp")


class ForwardError(RuntimeError):
    """The error of the forward."""


def raise_forward_error(module: nn.Module, inputs: object, output: object) -> None:
    raise ForwardError


def losses_around_error(model: nn.Module, tokens: Tensor, kind: type[torch.optim.Optimizer]) -> list[float]:
    """Of three steps; in the second the forward raises first, within a block."""
    optimizer = kind(model.parameters(), lr=1e-2)
    found = []
    for step in range(3):
        if step == 1:
            handle = model.blocks[1].register_forward_hook(raise_forward_error)
            with pytest.raises(ForwardError):
                model(tokens)
            handle.remove()
        loss = model(tokens).float().square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.item())
    return found


@pytest.mark.parametrize("plan", PLANS)
def test_training_goes_on(plan: str) -> None:
    tokens = toy_tokens(0, 0, 0)[:, :-1]
    expected = torch.tensor(losses_around_error(build_seeded_model(), tokens, torch.optim.AdamW))

    def rank(world: World) -> list[float]:
        return losses_around_error(
            npuzero.zero(build_seeded_model(), plan=plan, local_size=2, world=world), tokens, npuzero.AdamW
        )

    for found in comm.run_threads(4, rank):
        assert relative_difference(torch.tensor(found), expected) <= BOUND


@pytest.mark.parametrize("plan", ["zero3", "hpz", "hsdp"])
def test_nothing_stays_gathered(plan: str) -> None:
    def rank(world: World) -> None:
        model = npuzero.zero(build_seeded_model(), plan=plan, local_size=2, world=world)
        model.blocks[1].register_forward_hook(raise_forward_error)
        with pytest.raises(ForwardError):
            model(toy_tokens(0, 0, 0)[:, :-1])
        for parameter in (model.tokens.weight, model.blocks[1].qkv.weight):
            with pytest.raises(StateError, match="to be read while unit"):
                parameter.sum()

    comm.run_threads(4, rank)
