"""Set up all tests."""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Iterator
from pathlib import Path

# Processes that tests start import test modules by their full name. Appended last: the installed npuzero comes first.
sys.path.append(str(Path(__file__).resolve().parents[1]))

# Threads that wait by spinning take cores from the ranks and processes that tests start. The OpenMP runtime reads this
# when torch loads it, and child processes inherit it.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
# One rank refuses what several would, so that a test of one rank holds for many. `permissive` turns this off.
os.environ.setdefault("NPUZERO_STRICT", "1")

import pytest
import torch
from _pytest.mark import ParameterSet

from npuzero.device import KINDS

# Nearly all objects made during collection stay alive: searching them for garbage takes a fifth of that time.
gc.disable()


def pytest_runtest_setup(item: pytest.Item) -> None:
    found = KINDS["cuda"].available()
    if item.get_closest_marker("gpu") and not found.ok:
        pytest.skip(f"needs an NVIDIA GPU: {found.reason}")


@pytest.hookimpl(tryfirst=True)  # before pytest deselects items
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Keep the squares of one colour of a checkered grid for `make test`: every other square of each row and column."""
    for item in items:
        if item.get_closest_marker("checkered") and sum(_square(item)) % 2:
            item.add_marker(pytest.mark.slow)


def _square(item: pytest.Item) -> Iterator[int]:
    """Return the position of a case along each axis of its grid."""
    for axis in item.iter_markers("parametrize"):
        names, points = axis.args
        names = [names] if isinstance(names, str) else names
        values = [point.values if isinstance(point, ParameterSet) else (point,) for point in points]
        values = [each[0] if len(each) < len(names) else each for each in values]  # a point of several names is a tuple
        yield [[*map(id, each)] for each in values].index([id(item.callspec.params[name]) for name in names])


def pytest_collection_finish() -> None:
    """Freeze the objects that exist now: they stay to the end, and a full collection need not scan them each time."""
    gc.collect()
    gc.freeze()
    gc.enable()


#: The index of this process among the processes that share the tests.
_WORKER = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))


@pytest.fixture(autouse=True)
def _one_core(request: pytest.FixtureRequest) -> Iterator[None]:
    """Pin this process to one core. Python runs one thread at a time, and torch releases the GIL at every op.

    On several cores, a waiting thread takes the GIL at that moment, and its holder sleeps until it gets it back. Where
    ranks are threads, this costs a third of the time. On one core the holder has the GIL again before another thread
    runs. Threads that a test starts inherit the core. Tests that start ranks as processes have all cores.
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
    """Allow calls that one rank can make alone, as npuzero does by default."""
    monkeypatch.setenv("NPUZERO_STRICT", "0")


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)
