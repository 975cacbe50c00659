"""Common to all tests."""

from __future__ import annotations

import os
import sys
from pathlib import Path

# Processes that tests start import test modules by their full name; last, so that the installed npuzero comes first.
sys.path.append(str(Path(__file__).resolve().parents[1]))

# Threads that wait by spinning take the cores from the ranks and processes that tests start beside them. Read by the
# OpenMP runtime when torch loads it, and inherited by child processes.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import pytest
import torch


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)
