"""Common to the tests of frameworks' doors: what two ranks left of a case."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from frameworks.toys import launch_torchrun


@pytest.fixture(scope="module")
def cases(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The folder with a case's results; a module's QUICK ones, and its REST, come of one run of its RANKS each."""
    module = request.module
    ran: dict[tuple[str, ...], Path] = {}

    def folder_of(name: str) -> Path:
        group = module.QUICK if name in module.QUICK else module.REST
        if group not in ran:
            ran[group] = tmp_path_factory.mktemp("cases")
            launch_torchrun(module.RANKS, ran[group], *group)
        return ran[group]

    return folder_of
