"""Common to all tests."""

from __future__ import annotations

import gc
import os
import sys
from pathlib import Path

# Processes that tests start import test modules by their full name; last, so that the installed npuzero comes first.
sys.path.append(str(Path(__file__).resolve().parents[1]))

# Threads that wait by spinning take the cores from the ranks and processes that tests start beside them. Read by the
# OpenMP runtime when torch loads it, and inherited by child processes.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
# One rank refuses what several would: a test of one rank shows what holds for many. `permissive` says otherwise.
os.environ.setdefault("NPUZERO_STRICT", "1")

import pytest
import torch

from npuzero.device import KINDS


def pytest_runtest_setup(item: pytest.Item) -> None:
    found = KINDS["cuda"].available()
    if item.get_closest_marker("gpu") and not found.ok:
        pytest.skip(f"needs an NVIDIA GPU: {found.reason}")


def pytest_collection_finish() -> None:
    """What is there now stays to the end; tests that ask for a full collection need not wait for it each time."""
    gc.collect()
    gc.freeze()


@pytest.fixture
def permissive(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let one rank do what it can do alone, as npuzero does by default."""
    monkeypatch.setenv("NPUZERO_STRICT", "0")


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)
