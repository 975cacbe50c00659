"""Common to all tests of worlds."""

from __future__ import annotations

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
