"""Clipping by any p-norm: torch's norm over unique elements, tied and frozen parameters and all, under every preset."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cache

import pytest
import torch
from torch import Tensor, nn

import npuzero
from npuzero import Settings
from world.train import Session, State, assert_same_bits, assert_states_close, check_equals_plain, run_cut, run_plain

P_NORMS = (1.0, 2.0, 3.5, math.inf)
PLANS = ("zero0", "zero1", "zero1.5", "zero2", "zero3", "hsdp")
every_plan = pytest.mark.parametrize(
    "plan", [pytest.param(plan, marks=() if plan in PLANS else pytest.mark.slow) for plan in npuzero.PRESETS]
)


def every_norm(session: Session) -> State:
    """Steps clipped by one norm after another to half of it, one of them scaled."""
    optimizer, scaler = session.optimizer(torch.optim.AdamW, lr=3e-3), session.scaler(init_scale=2.0**10)
    norms = []
    for step, p in enumerate((*P_NORMS, 0.5)):
        loss = session.loss(step)
        if step % 2:
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
        else:
            loss.backward()
        with torch.no_grad():
            norms.append(session.clip(1e30, p))
        norms.append(session.clip(0.5 * norms[-1].item(), p))
        if step % 2:
            scaler.step(optimizer)
            scaler.update()
        else:
            optimizer.step()
        optimizer.zero_grad()
    return {"norms": torch.stack(norms)}


@cache
def train_clipped(plan: str) -> State:
    states = run_cut(every_norm, 4, plan=plan, local_size=2)
    for state in states[1:]:
        assert_same_bits(state, states[0])
    return states[0]


@cache
def plain_norms() -> State:
    return run_plain(every_norm, 4)


@every_plan
def test_norms_are_torchs(plan: str) -> None:
    found = train_clipped(plan)
    assert_states_close(found, plain_norms())
    for norm, again in found["norms"].view(-1, 2).tolist():
        assert norm == again > 0  # the first one clipped nothing
    assert found["norms"].dtype is torch.float32


@pytest.mark.parametrize("plan", ["zero1", "zero2", "zero3"])
def test_stages_have_the_same_bits(plan: str) -> None:
    assert_same_bits(train_clipped(plan), train_clipped("zero0"))


@pytest.mark.parametrize("p", P_NORMS)
def test_nothing_to_clip_has_no_norm(p: float) -> None:
    assert run_cut(lambda session: {"norm": session.clip(1.0, p)}, 2, plan="zero2")[0]["norm"] == 0


@pytest.mark.parametrize("p", P_NORMS)
@pytest.mark.parametrize("value", [math.inf, math.nan])
def test_what_is_not_finite_shows_in_the_norm(p: float, value: float) -> None:
    """On every rank, wherever it is."""

    def scenario(session: Session) -> State:
        loss = session.loss()
        (loss * value if session.ranks[0] == 1 else loss).backward()
        return {"norm": session.clip(1.0, p)}

    for state in run_cut(scenario, 2, plan="zero3"):
        assert not state["norm"].isfinite()


def test_a_norm_beyond_float32s_squares() -> None:
    """Squares of 1e25 are infinite in float32; the norm is not."""

    def scenario(session: Session) -> State:
        (session.loss() * 1e25).backward()
        return {"norm": session.clip(1.0)}

    norm = run_cut(scenario, 2, plan="zero3")[0]["norm"].item()
    assert 1e24 < norm < 1e28


class UnevenFlats(nn.Module):
    """Blocks with equally long flat parameters, and parameters that end at different offsets in them."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(dim, dim - i, bias=i != 1) for i in (0, 1, 3))

    def forward(self, x: Tensor, order: Sequence[int]) -> Tensor:
        return torch.stack([self.blocks[i](x).square().mean() for i in order]).sum()


@pytest.mark.parametrize("plan", ["zero1", "zero2"])
@pytest.mark.parametrize("dim", [13, 515])
def test_gaps_count_for_nothing(dim: int, plan: str) -> None:
    """Padding between parameters, with an earlier unit's values in memory, is no part of the norm."""
    orders = (0, 1, 2), (2, 0, 1), (1, 2)

    def steps(session: Session) -> State:
        optimizer, norms = session.optimizer(torch.optim.AdamW, lr=1e-3), []
        for step in range(6):
            x = torch.randn(4, dim, generator=torch.Generator().manual_seed(step))
            order = orders[step % 3]
            session.mean(lambda rank, x=x, order=order: session.model(x * (1 + rank), order=order)).backward()
            norms.append(session.clip(0.1))
            optimizer.step()
            optimizer.zero_grad()
        return {"norms": torch.stack(norms)}

    check_equals_plain(steps, 2, lambda: UnevenFlats(dim), plan=plan, settings=Settings(overlap=False))
