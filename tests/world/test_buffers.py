"""Buffers written in forward: each rank's own, rank 0's as under DDP, or their average."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import npuzero
from npuzero import ConfigError, comm
from npuzero.comm import World
from world.toy import build_seeded_model

SIZE = 4


class BatchNormModel(nn.Module):
    """BatchNorm with its rank's own statistics, next to an integer and a low-precision buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)) for _ in range(2)))
        self.register_buffer("odd", torch.zeros(3, dtype=torch.bool))
        self.register_buffer("low", torch.zeros((), dtype=torch.bfloat16))
        self.register_buffer("empty", torch.zeros(0))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.low += x.detach().mean().bfloat16()
            self.odd[0] = bool(x.flatten()[0] > 0)
        return self.layers(x)


def buffers_batch(step: int, rank: int) -> Tensor:
    return torch.randn(8, 4, generator=torch.Generator().manual_seed(10 * step + rank)) + rank


@cache
def buffers_after_training(plan: str, rule: str | None, steps: int = 3) -> list[dict[str, Tensor]]:
    """Return each rank's buffers in an evaluation after some steps."""

    def rank(world: World) -> dict[str, Tensor]:
        model: Any = npuzero.zero(
            build_seeded_model(make=BatchNormModel), plan=plan, local_size=2, world=world, buffers=rule
        )
        optimizer = npuzero.AdamW(model.parameters(), lr=1e-2)
        for step in range(steps):
            # Two forwards before a backward, as for an adversarial loss.
            (
                model(buffers_batch(step, world.rank)).square().sum() + model(buffers_batch(step, world.rank)).sum()
            ).backward()
            optimizer.step()
            optimizer.zero_grad()
        model.eval()
        for _ in range(2):
            model(buffers_batch(0, 0))
        return {name: buffer.clone() for name, buffer in model.named_buffers()}

    return comm.run_threads(SIZE, rank)


@pytest.mark.parametrize("plan", ["zero0", "zero2", "zero3", "hsdp"])
@pytest.mark.parametrize("rule", ["broadcast", "average"])
def test_all_ranks_evaluate_with_the_same_statistics(rule: str, plan: str) -> None:
    first, *others = buffers_after_training(plan, rule)
    assert all(torch.equal(first[name], other[name]) for other in others for name in first)
    assert first["layers.0.1.num_batches_tracked"] == 6


@pytest.mark.parametrize("plan", ["zero0", "zero3"])
def test_each_rank_has_its_own_unless_told(plan: str) -> None:
    first, *others = buffers_after_training(plan, None)
    assert not any(torch.equal(first["layers.0.1.running_mean"], other["layers.0.1.running_mean"]) for other in others)


def test_broadcast_and_average_say_what_they_mean() -> None:
    """After one forward of each rank the statistics are known."""

    def rank(world: World) -> tuple[Tensor, ...]:
        found = []
        for rule in ("broadcast", "average"):
            model: Any = npuzero.zero(nn.BatchNorm1d(4), plan="zero3", world=world, buffers=rule)
            model(buffers_batch(0, world.rank))
            model.eval()(buffers_batch(0, 0))
            found.append(model.running_mean.clone())
        return tuple(found)

    means = torch.stack([0.1 * buffers_batch(0, rank).mean(0) for rank in range(2)])
    for broadcast, average in comm.run_threads(2, rank):
        torch.testing.assert_close(broadcast, means[0])
        torch.testing.assert_close(average, means.mean(0))


def test_an_unknown_rule_names_the_nearest() -> None:
    with pytest.raises(ConfigError, match="'average'"):
        npuzero.zero(BatchNormModel(), buffers="averaged")


def test_ranks_that_disagree_on_the_rule() -> None:
    def rank(world: World) -> None:
        with pytest.raises(ConfigError, match="buffers"):
            npuzero.zero(
                build_seeded_model(make=BatchNormModel), world=world, buffers="average" if world.rank else None
            )

    comm.run_threads(2, rank)
