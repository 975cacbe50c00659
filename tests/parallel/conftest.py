"""Set up all tests of parallel axes."""

from __future__ import annotations

from world.conftest import one_thread_per_rank

__all__ = ["one_thread_per_rank"]
