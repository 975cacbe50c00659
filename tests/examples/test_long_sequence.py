"""The example of long sequences: ranks that share sequences learn what one rank does, and have its losses."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from examples.pages import ROOT, run_script

pytest.importorskip("transformers")

SCRIPT = ROOT / "examples" / "long_sequence" / "train.py"


def long_sequence_losses(ranks: int, folder: Path, *how: str) -> list[float]:
    folder.mkdir()
    printed = run_script(SCRIPT, ranks, folder, "--length", "64", "--steps", "40", *how)
    found = json.loads((folder / "runs/long_sequence/result.json").read_text())
    assert found["ranks"] == ranks and f"-> {found['losses'][-1]:.3f}" in printed
    return found["losses"]


@pytest.mark.world
@pytest.mark.slow
def test_ranks_that_share_a_sequence_have_the_losses_of_one(tmp_path: Path) -> None:
    alone = long_sequence_losses(1, tmp_path / "1")
    assert alone[-1] < 0.5 * alone[0]
    assert long_sequence_losses(2, tmp_path / "2") == pytest.approx(alone, rel=1e-2)
    assert long_sequence_losses(4, tmp_path / "4", "--sequence", "4", "--weights", "2") == pytest.approx(
        alone, rel=1e-2
    )


@pytest.mark.world
def test_it_learns(tmp_path: Path) -> None:
    found = long_sequence_losses(1, tmp_path / "1")
    assert found[-1] < 0.7 * found[0]
