"""Training of the toy model by npuzero, on one rank of any world."""

from __future__ import annotations

from typing import Any

from torch import Tensor

import npuzero
from npuzero.comm import World
from tests.world.toy import Recipe, build, groups_of, loss_of, tokens_of


def train_cut(world: World, recipe: Recipe, model: Any = None, **options: Any) -> tuple[dict[str, Tensor], Any]:
    """Train under ``npuzero.zero(model, **options)``; whole parameters and the model."""
    model = npuzero.zero(build() if model is None else model, world=world, **options)
    optimizer = npuzero.AdamW(groups_of(model, recipe), lr=1e-2)
    for step in range(recipe.steps):
        for micro_batch in range(recipe.micro_batches):
            loss = loss_of(model, tokens_of(step, micro_batch, world.rank, recipe)) / recipe.micro_batches
            loss.backward()
        if recipe.clip is not None:
            npuzero.clip_grad_norm_(model, recipe.clip)
        optimizer.step()
        optimizer.zero_grad()
    return npuzero.full_state_dict(model, rank0_only=False), model


def worst(found: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    """Largest difference of any tensor, relative to its largest magnitude."""
    assert found.keys() == expected.keys()
    ratios = [0.0]
    for name, value in expected.items():
        if value.numel():
            scale = value.float().abs().max().clamp(min=1e-30)
            ratios.append(float((found[name].float() - value.float()).abs().max() / scale))
    return max(ratios)
