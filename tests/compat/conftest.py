"""Common to all tests of doors."""

from __future__ import annotations

import os

from world.conftest import one_core_for_ranks_that_are_threads, one_thread_per_rank

__all__ = ["one_core_for_ranks_that_are_threads", "one_thread_per_rank"]

# Where DeepSpeed is installed it is compared with on the CPU, whatever else there is.
os.environ.setdefault("DS_ACCELERATOR", "cpu")
