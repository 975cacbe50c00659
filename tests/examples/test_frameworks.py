"""The programs of docs/frameworks.md, as they stand there: by one process and by torchrun."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest

from examples.pages import find_page_programs, run_program_text

PROGRAMS = find_page_programs("frameworks.md")
NEEDS = ("accelerate", "transformers", "lightning")


@pytest.mark.slow
@pytest.mark.world
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("framework", NEEDS)
def test_the_program_runs(framework: str, ranks: int, tmp_path: Path) -> None:
    if find_spec(framework) is None:
        pytest.skip(f"{framework} is not installed")
    program = next(text for text in PROGRAMS if f"npuzero.{framework}" in text)
    assert run_program_text(program, ranks, tmp_path).count("loss") >= ranks
    assert (tmp_path / "weights" / "model.safetensors").is_file()
