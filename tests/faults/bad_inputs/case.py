"""The rows of the table of bad inputs, and their common helpers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

import npuzero
from npuzero import NpuZeroError
from npuzero.comm import World
from world.toy import build_seeded_model

Provoke = Callable[[World], object]


@dataclass(frozen=True)
class BadInput:
    """Describe one row: how to provoke it, the number of ranks, each rank's error (None: none), and its text."""

    name: str
    provoke: Provoke
    error: type[NpuZeroError] | None
    says: tuple[str, ...]
    ranks: int = 1


class BadInputTable(dict[str, BadInput]):
    """Collect the rows of one part of the package, by name."""

    def bad(self, name: str, error: type[NpuZeroError], *says: str, ranks: int = 1) -> Callable[[Provoke], Provoke]:
        """Add the decorated function to the table: each rank gets ``error``."""
        return self._row(name, error, says, ranks)

    def fine(self, name: str, ranks: int = 2) -> Callable[[Provoke], Provoke]:
        """Add the decorated function to the table: no error may be raised."""
        return self._row(name, None, (), ranks)

    def _row(
        self, name: str, error: type[NpuZeroError] | None, says: tuple[str, ...], ranks: int
    ) -> Callable[[Provoke], Provoke]:
        def add(function: Provoke) -> Provoke:
            assert name not in self, name
            self[name] = BadInput(name, function, error, says, ranks)
            return function

        return add


def shard_toy(world: World, stage: Any = None, model: Any = None, **options: Any) -> Any:
    """Shard a toy model over the ranks, by default under zero3; ``world`` keeps it alive for the row."""
    world.model = npuzero.zero(build_seeded_model() if model is None else model, stage, world=world, **options)  # type: ignore[attr-defined]
    return world.model  # type: ignore[attr-defined]


def bad_input_loss(model: nn.Module, rank: int = 0) -> Tensor:
    return model(torch.arange(rank, rank + 12)[None]).square().mean()


def backward_toy_loss(model: nn.Module, world: World) -> None:
    bad_input_loss(model, world.rank).backward()
