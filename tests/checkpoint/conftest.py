"""Common to all tests of checkpoints."""

from __future__ import annotations

from world.conftest import one_core_for_ranks_that_are_threads, one_thread_per_rank

__all__ = ["one_core_for_ranks_that_are_threads", "one_thread_per_rank"]
