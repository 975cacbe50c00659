"""Common to all tests of doors."""

from __future__ import annotations

import os

from world.conftest import one_thread_per_rank

__all__ = ["one_thread_per_rank"]

# Where DeepSpeed is installed it is compared with on the CPU, whatever else there is.
os.environ.setdefault("DS_ACCELERATOR", "cpu")
