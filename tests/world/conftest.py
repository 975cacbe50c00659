"""Set up all tests of worlds."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(autouse=True)
def one_thread_per_rank() -> Iterator[None]:
    """One thread per rank: ranks are the parallelism, and the oracle's sums must not depend on the number of cores."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
