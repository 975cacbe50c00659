"""All mutants."""

from __future__ import annotations

from . import checkpoint, comm, optim, shard
from .mutant import Mutant

MUTANTS: tuple[Mutant, ...] = (*shard.MUTANTS, *checkpoint.MUTANTS, *optim.MUTANTS, *comm.MUTANTS)
