"""Losses written down once: neither the oracle nor the engine may drift from them unseen."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest
import torch

import npuzero
from golden.losses import FILE, RANKS, STEPS, plain_golden_losses, session_losses
from npuzero import comm
from npuzero.comm import World
from world.toy import build_seeded_model
from world.train import CutSession

GOLDEN = json.loads(FILE.read_text(encoding="utf-8"))


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def test_the_file_is_of_a_model_that_learns() -> None:
    assert len(GOLDEN) == STEPS
    assert GOLDEN[-1] < 0.8 * GOLDEN[0]


def test_plain_torch_still_gives_them() -> None:
    assert plain_golden_losses() == pytest.approx(GOLDEN, rel=1e-5)


@pytest.mark.parametrize("plan", npuzero.PRESETS)
def test_every_preset_gives_them(plan: str) -> None:
    def rank(world: World) -> list[float]:
        session = CutSession(
            build_seeded_model(), world, plan=plan, local_size=1 if plan in ("hpz", "zero1.5") else None
        )
        losses = session_losses(session)
        session.state()
        return losses

    by_rank = comm.run_threads(RANKS, rank)
    means = [sum(losses) / RANKS for losses in zip(*by_rank, strict=True)]
    assert means == pytest.approx(GOLDEN, rel=1e-5)
