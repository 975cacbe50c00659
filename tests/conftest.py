"""Common to all tests."""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Iterator
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
from _pytest.mark import ParameterSet

from npuzero.device import KINDS

# Until all tests are collected nearly all that is made stays: to look for garbage in it takes a fifth of that time.
gc.disable()


def pytest_runtest_setup(item: pytest.Item) -> None:
    found = KINDS["cuda"].available()
    if item.get_closest_marker("gpu") and not found.ok:
        pytest.skip(f"needs an NVIDIA GPU: {found.reason}")


@pytest.hookimpl(tryfirst=True)  # before those that are not asked for are left out
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Of a checkered grid `make test` has the squares of one colour: of each row and column every other square."""
    for item in items:
        if item.get_closest_marker("checkered") and sum(_square(item)) % 2:
            item.add_marker(pytest.mark.slow)


def _square(item: pytest.Item) -> Iterator[int]:
    """Where a case is along each axis of its grid."""
    for axis in item.iter_markers("parametrize"):
        names, points = axis.args
        names = [names] if isinstance(names, str) else names
        values = [point.values if isinstance(point, ParameterSet) else (point,) for point in points]
        values = [each[0] if len(each) < len(names) else each for each in values]  # a point of several names is a tuple
        yield [[*map(id, each)] for each in values].index([id(item.callspec.params[name]) for name in names])


def pytest_collection_finish() -> None:
    """What is there now stays to the end; tests that ask for a full collection need not wait for it each time."""
    gc.collect()
    gc.freeze()
    gc.enable()


#: Which of the processes that share these tests this is.
_WORKER = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))


@pytest.fixture(autouse=True)
def _one_core(request: pytest.FixtureRequest) -> Iterator[None]:
    """Python runs one thread at a time, and torch lets go of its lock at every op.

    On several cores, whoever waits for the lock takes it there, and its holder sleeps until it comes back: where ranks
    are threads, a third of all the time. On one core the holder has it again before anybody else runs. Threads that a
    test starts are where it is. Tests that start ranks as processes have all cores.
    """
    if request.node.get_closest_marker("world"):
        yield
        return
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {sorted(before)[_WORKER % len(before)]})
    yield
    os.sched_setaffinity(0, before)


@pytest.fixture
def permissive(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let one rank do what it can do alone, as npuzero does by default."""
    monkeypatch.setenv("NPUZERO_STRICT", "0")


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)
