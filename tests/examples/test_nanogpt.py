"""The nanoGPT-like script, before and after: few lines apart, and the same losses."""

from __future__ import annotations

import difflib
import re
from pathlib import Path

import pytest

from examples.pages import ROOT, run_script

FOLDER = ROOT / "examples" / "nanogpt"


def parse_printed_values(script: str, ranks: int, folder: Path, *arguments: str) -> dict[str, float]:
    """What rank 0 prints, by step and name."""
    folder.mkdir(exist_ok=True)
    text = run_script(FOLDER / script, ranks, folder, "--out", str(folder), "--eval-every", "2", *arguments)
    found = {}
    for step, values in re.findall(r"step (\d+): (.*)", text):
        found |= {f"{step} {name}": float(value) for name, value in re.findall(r"([a-z-]+(?: loss)?) ([\d.]+)", values)}
    return found


def test_few_lines_are_changed() -> None:
    before, after = ((FOLDER / name).read_text("utf-8").splitlines() for name in ("before.py", "train.py"))
    changed = written = 0
    for what, a, b, c, d in difflib.SequenceMatcher(None, before, after, autojunk=False).get_opcodes():
        if what != "equal":
            gone, come = (sum(bool(line.strip()) for line in lines) for lines in (before[a:b], after[c:d]))
            changed, written = changed + max(gone, come), written + come
    assert (changed, written) == (14, 7)
    assert "14 lines apart: 7 are written" in (FOLDER / "README.md").read_text("utf-8")


@pytest.mark.slow
@pytest.mark.world
def test_both_train_alike_and_go_on(tmp_path: Path) -> None:
    before = parse_printed_values("before.py", 1, tmp_path / "before", "--steps", "4")
    assert len(before) == 9 and min(before[f"{step} loss"] for step in (1, 2, 3)) < before["0 loss"]
    assert parse_printed_values("train.py", 1, tmp_path / "one", "--steps", "4") == pytest.approx(before, rel=1e-5)
    assert parse_printed_values("train.py", 2, tmp_path / "two", "--steps", "4") == pytest.approx(before, rel=1e-5)
    resumed = parse_printed_values(
        "train.py", 1, tmp_path / "two", "--steps", "4", "--resume"
    )  # from step 2, saved by two ranks
    expected = {key: value for key, value in before.items() if key[0] in "23" and "held" not in key}
    assert resumed == pytest.approx(expected, rel=1e-5)
