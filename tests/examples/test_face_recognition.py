"""The face-recognition example, in a small size: it learns, and with all people alike on one rank and on two."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from examples.pages import ROOT, run_script

SMALL = ("--classes", "501", "--steps", "11", "--batch", "32", "--features", "16")


def face_recognition_losses(ranks: int, folder: Path, *arguments: str) -> list[float]:
    text = run_script(ROOT / "examples" / "face_recognition" / "train.py", ranks, folder, *SMALL, *arguments)
    assert f"{-(-501 // ranks)} of 501 people on this rank" in text
    return [float(loss) for loss in re.findall(r"step \d+: loss ([\d.]+)", text)]


@pytest.mark.slow
@pytest.mark.world
def test_it_learns_alike_on_one_rank_and_on_two(tmp_path: Path) -> None:
    one, two = (face_recognition_losses(ranks, tmp_path, "--sample-rate", "1") for ranks in (1, 2))
    assert two == pytest.approx(one, abs=2e-4)
    assert two[1] < two[0]


@pytest.mark.slow
@pytest.mark.world
def test_it_learns_from_samples(tmp_path: Path) -> None:
    first, last = face_recognition_losses(2, tmp_path, "--plan", "zero3", "--margin", "cosface", "--lr", "3e-3")
    assert last < first
