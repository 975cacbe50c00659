"""All mutants."""

from __future__ import annotations

from . import activations, axes, between, checkpoint, comm, optim, plan, sends, sequences, shard, tiers
from .mutant import Mutant

PARTS = (plan, shard, axes, between, activations, tiers, checkpoint, optim, comm, sends, sequences)
MUTANTS: tuple[Mutant, ...] = tuple(mutant for part in PARTS for mutant in part.MUTANTS)
