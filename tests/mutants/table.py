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
    thin,
    tiers,
    wires,
)
from .mutant import Mutant

PARTS = (
    plan,
    shard,
    axes,
    between,
    cuts,
    activations,
    tiers,
    checkpoint,
    optim,
    comm,
    sends,
    ends,
    parallel,
    parts,
    pipelines,
    pipes,
    plan_axes,
    plan_pipes,
    schedules,
    sequences,
    stages,
    tensor,
    thin,
    wires,
)
MUTANTS: tuple[Mutant, ...] = tuple(mutant for part in PARTS for mutant in part.MUTANTS)
