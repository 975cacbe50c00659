"""One rank of a contender of these benchmarks, for npuzero.bench's worker; options as in benchmarks.step.work."""

from __future__ import annotations

import os
from typing import Any

import torch

from benchmarks.axes.contenders import CONTENDERS
from benchmarks.axes.llama import LlamaSizes
from benchmarks.step.work import StepRank

__all__ = ["CONTENDERS", "make"]


def make(rank: int, size: int, options: dict[str, Any]) -> StepRank:
    """Make the rank of this team."""
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    return StepRank(rank, options, LlamaSizes)
