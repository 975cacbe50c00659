"""Common to the tests of models that others wrote."""

from __future__ import annotations

from world.conftest import one_thread_per_rank

__all__ = ["one_thread_per_rank"]
