"""Common to the tests of models that others wrote."""

from __future__ import annotations

from world.conftest import one_thread_per_rank  # noqa: F401
