"""All mutants."""

from __future__ import annotations

from . import checkpoint, comm, optim, plan, shard
from .mutant import Mutant

MUTANTS: tuple[Mutant, ...] = (*plan.MUTANTS, *shard.MUTANTS, *checkpoint.MUTANTS, *optim.MUTANTS, *comm.MUTANTS)
