"""The GPT over three axes: its losses do not depend on the mesh, nor on the schedule."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from examples.pages import ROOT, run_script

SCRIPT = ROOT / "examples" / "pipeline_gpt" / "train.py"


def losses(ranks: int, folder: Path, *arguments: str) -> list[float]:
    printed = run_script(SCRIPT, ranks, folder, *arguments)
    found = [float(loss) for loss in re.findall(r"step \d+: loss ([\d.]+)", printed)]
    assert len(found) == 2, printed
    return found


@pytest.mark.world
@pytest.mark.slow
def test_it_learns_alike_on_any_mesh(tmp_path: Path) -> None:
    steps = ("--steps", "40")
    alone = losses(1, tmp_path, *steps)
    assert alone[1] < 0.8 * alone[0]
    assert losses(8, tmp_path, *steps) == pytest.approx(alone, rel=2e-3)
    chunks = ("--schedule", "interleaved", "--chunks", "2", "--preset", "zero3")
    assert losses(2, tmp_path, *steps, *chunks) == pytest.approx(alone, rel=2e-3)
