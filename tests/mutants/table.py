"""All mutants."""

from __future__ import annotations

from . import activations, checkpoint, comm, optim, plan, shard
from .mutant import Mutant

MUTANTS: tuple[Mutant, ...] = (
    *plan.MUTANTS,
    *shard.MUTANTS,
    *activations.MUTANTS,
    *checkpoint.MUTANTS,
    *optim.MUTANTS,
    *comm.MUTANTS,
)
