"""Parameters frozen on one rank only: every rank names them, in any call it waits in by then."""

from __future__ import annotations

import time

import pytest
import torch
from torch import nn

import npuzero
from npuzero import comm
from npuzero.comm import World
from npuzero.comm.watchdog.frozen_parameters import describe_frozen_difference, record_frozen
from npuzero.errors import NpuZeroError

#: Seconds until every rank must have the error.
TOLD_S = 5.0


@pytest.mark.parametrize("frozen", ("0.", "1.", ""), ids=("first layer", "middle layer", "all layers"))
@pytest.mark.parametrize("plan", ("zero0", "zero2", "zero3", "offload3"))
def test_every_rank_names_what_another_has_frozen(plan: str, frozen: str) -> None:
    errors: dict[int, NpuZeroError] = {}

    def rank(world: World) -> None:
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 8), nn.Linear(8, 2))
        model = npuzero.zero(net, plan=plan, world=world)
        optimizer = npuzero.AdamW(model.parameters(), lr=1e-3)
        for step in range(3):
            if world.rank == 1 and step == 1:
                for name, parameter in model.named_parameters():
                    parameter.requires_grad_(not name.startswith(frozen))
            begin_s = time.monotonic()
            try:
                loss = model(torch.randn(3, 4)).square().mean()
                if loss.requires_grad:
                    loss.backward()
                optimizer.step()
            except NpuZeroError as error:
                assert time.monotonic() - begin_s < TOLD_S
                errors[world.rank] = error
                return
            optimizer.zero_grad()

    comm.run_threads(2, rank)
    name = f"{frozen or '0.'}weight"
    assert sorted(errors) == [0, 1]
    for error in errors.values():
        told = f"{error.subject} {error.got}"
        assert name in told or name.replace("weight", "bias") in told, error
        assert "on rank 1" in told and ("frozen" in error.expected or "requires_grad" in error.subject), error


def test_models_of_different_parameters_are_not_compared() -> None:
    """Stages of a pipeline, for example."""
    first, second = record_frozen("first", ["a"]), record_frozen("second", [])
    assert not describe_frozen_difference({0: [first], 1: [second]})
    assert describe_frozen_difference({0: [first], 1: [record_frozen("first", list("bcdefgh"))]}) == (
        "a on rank 0; b, c, d, e, f and 2 more on rank 1"
    )
