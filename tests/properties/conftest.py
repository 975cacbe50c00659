"""Common to all tests of properties."""

from __future__ import annotations

from world.conftest import one_core_for_ranks_that_are_threads

__all__ = ["one_core_for_ranks_that_are_threads"]
