"""Mixtures of experts in which a step leaves experts out: on every rank, or on one of them."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor, nn

import npuzero
from models.training import TransformersLoop, make_stirred_model
from models.zoo import zoo_batch
from world.train import Session, State, check_equals_plain

pytestmark = pytest.mark.filterwarnings("ignore:.gradient_checkpointing_enable.:FutureWarning")

WIDTH, EXPERTS = 16, 4


class ExpertList(nn.Module):
    """A list of experts; each sample goes to one, and an expert without samples is not called."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH)) for _ in range(EXPERTS)
        )

    def forward(self, x: Tensor, chosen: Tensor) -> Tensor:
        out = x.clone()
        for index, expert in enumerate(self.experts):
            here = (chosen == index).nonzero().flatten()
            if len(here):
                out = out.index_add(0, here, expert(self.norm(x[here])))
        return out


class MixtureModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(ExpertList() for _ in range(3))
        self.head = nn.Linear(WIDTH, 1)

    def forward(self, x: Tensor, chosen: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x, chosen)
        return self.head(x)


#: Which expert rank ``rank`` needs in step ``step``: the same on all ranks, each rank its own, one only on rank 0.
ROUTES: dict[str, Callable[[int, int], int]] = {
    "one expert, the same everywhere": lambda step, rank: step % 2,
    "each rank another": lambda step, rank: (step + rank) % EXPERTS,
    "one on rank 0 alone": lambda step, rank: 3 if rank == 0 and step == 1 else 0,
}


def train_mixture(session: Session, route: str) -> State:
    optimizer = session.optimizer(torch.optim.AdamW, lr=1e-2, weight_decay=0.1)

    def loss(step: int, rank: int) -> Tensor:
        x = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(10 * step + rank))
        return (session.model(x, torch.full((4,), ROUTES[route](step, rank))) - 1).square().mean()

    for step in range(5):
        session.mean(partial(loss, step)).backward()
        optimizer.step()
        optimizer.zero_grad()
    return {}


@pytest.mark.parametrize("plan", npuzero.PRESETS)
@pytest.mark.parametrize("route", ROUTES)
def test_experts_that_no_sample_needs(route: str, plan: str) -> None:
    check_equals_plain(partial(train_mixture, route=route), 2, MixtureModel, plan=plan)


def train_on_one_token(session: Session) -> State:
    """All tokens of a rank are one token, so a layer's router chooses two experts out of eight for all of them."""
    optimizer = session.optimizer(torch.optim.AdamW, lr=1e-2, eps=1e-3)

    def loss(step: int, rank: int) -> Tensor:
        tokens = torch.full_like(zoo_batch(session.model, step, 0, rank)["input_ids"], 5 + rank)
        return session.model(input_ids=tokens, labels=tokens).loss

    for step in range(4):
        session.mean(partial(loss, step)).backward()
        optimizer.step()
        optimizer.zero_grad()
    return {}


@pytest.mark.parametrize("plan", ["zero2", "zero3"])
def test_experts_within_one_weight(plan: str) -> None:
    """Mixtral's experts are rows of one 3-D weight: those left out have gradients of zero, as in plain torch."""
    check_equals_plain(train_on_one_token, 2, make_stirred_model("mixtral", num_local_experts=8), plan=plan)


@pytest.mark.slow
@pytest.mark.parametrize("plan", npuzero.PRESETS)
def test_experts_with_gradient_checkpointing(plan: str) -> None:
    check_equals_plain(
        TransformersLoop(checkpointing=True, micro_batches=2),
        3,
        make_stirred_model("mixtral", num_local_experts=8),
        plan=plan,
    )
