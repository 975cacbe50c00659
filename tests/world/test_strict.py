"""Strict mode: a world of one refuses what several ranks refuse, with the same words."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

import npuzero
from npuzero import comm
from npuzero.comm import World


def read_gradient(model: nn.Module) -> None:
    next(model.parameters()).grad.norm()  # type: ignore[union-attr]


def clip_as_torch_does(model: nn.Module) -> None:
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)


def step_as_torch_does(model: nn.Module) -> None:
    parameter = next(model.parameters())
    torch.optim.SGD([parameter], lr=0.1, foreach=False).step()


def mix(model: nn.Module) -> None:
    npuzero.AdamW([*model.parameters(), nn.Parameter(torch.ones(2))], lr=0.1).step()


def load(model: nn.Module) -> None:
    model.load_state_dict({})


def refusal(world: World, act: Callable[[nn.Module], None], stage: int, strict: bool) -> str | None:
    torch.manual_seed(0)
    settings = npuzero.Settings(strict=strict)
    model = npuzero.zero(nn.Linear(4, 4), stage=stage, world=world, settings=settings)
    model(torch.ones(2, 4)).sum().backward()
    try:
        act(model)
    except npuzero.errors.StateError as error:
        return str(error)
    except RuntimeError:  # torch's own: nothing that a plan refuses
        return None
    return None


@pytest.mark.parametrize(
    ("act", "stage"),
    [(read_gradient, 0), (read_gradient, 2), (clip_as_torch_does, 2), (step_as_torch_does, 2), (mix, 1), (load, 3)],
)
def test_one_strict_rank_refuses_what_two_refuse(act: Callable[[nn.Module], None], stage: int) -> None:
    on_two = comm.run_threads(2, lambda world: refusal(world, act, stage, False))[0]
    on_one = comm.run_threads(1, lambda world: refusal(world, act, stage, True))[0]
    assert on_two is not None
    assert on_one == on_two


def test_the_variable_makes_every_model_strict(monkeypatch: pytest.MonkeyPatch) -> None:
    assert comm.run_threads(1, lambda world: refusal(world, mix, 1, False)) == [None]
    monkeypatch.setenv("NPUZERO_STRICT", "0")
    assert comm.run_threads(1, lambda world: refusal(world, mix, 1, False)) == [None]
    monkeypatch.setenv("NPUZERO_STRICT", "1")
    assert comm.run_threads(1, lambda world: refusal(world, mix, 1, False)) != [None]
