"""Common to all tests of doors."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch

# Where DeepSpeed is installed it is compared with on the CPU, whatever else there is.
os.environ.setdefault("DS_ACCELERATOR", "cpu")


@pytest.fixture(autouse=True)
def one_thread_per_rank() -> Iterator[None]:
    """Ranks are the parallelism here; and plain torch's sums do not depend on how many cores there are."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
