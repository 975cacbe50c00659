"""All mutants."""

from __future__ import annotations

from . import (
    activations,
    axes,
    between,
    checkpoint,
    comm,
    cuts,
    ends,
    optim,
    parallel,
    parts,
    pipelines,
    pipes,
    plan,
    plan_axes,
    plan_pipes,
    schedules,
    sends,
    sequences,
    shard,
    stages,
    tensor,
    tiers,
    wires,
)
from .mutant import Mutant

PARTS = (
    plan,
    shard,
    axes,
    between,
    parts,
    cuts,
    ends,
    activations,
    tiers,
    checkpoint,
    optim,
    comm,
    sends,
    parallel,
    pipelines,
    pipes,
    plan_axes,
    plan_pipes,
    schedules,
    sequences,
    tensor,
    stages,
    wires,
)
MUTANTS: tuple[Mutant, ...] = tuple(mutant for part in PARTS for mutant in part.MUTANTS)
