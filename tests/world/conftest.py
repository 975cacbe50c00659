"""Common to all tests of worlds."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(autouse=True)
def one_thread_per_rank() -> Iterator[None]:
    """Ranks are the parallelism here; and the oracle's sums do not depend on how many cores there are."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


#: Which of the processes that share these tests this is.
_WORKER = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))


@pytest.fixture(autouse=True)
def one_core_for_ranks_that_are_threads(request: pytest.FixtureRequest) -> Iterator[None]:
    """Python runs one of them at a time, and torch lets go of its lock at every op.

    On several cores, whoever waits for the lock takes it there, and its holder sleeps until it comes back: a third of
    all the time these tests take. On one core the holder has it again before anybody else runs. Threads that a test
    starts are where it is; ranks that are processes have all cores.
    """
    if request.node.get_closest_marker("world"):
        yield
        return
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {sorted(before)[_WORKER % len(before)]})
    yield
    os.sched_setaffinity(0, before)
