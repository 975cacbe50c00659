"""The GPT over three axes: its losses do not depend on the mesh, nor on the schedule; checkpoints know of none."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from safetensors.torch import load_file

from examples.pages import ROOT, run_script

SCRIPT = ROOT / "examples" / "pipeline_gpt" / "train.py"


def pipeline_gpt_losses(ranks: int, folder: Path, *arguments: str) -> list[float]:
    printed = run_script(SCRIPT, ranks, folder, *arguments)
    found = [float(loss) for loss in re.findall(r"step \d+: loss ([\d.]+)", printed)]
    assert found, printed
    return found


@pytest.mark.world
@pytest.mark.slow
def test_it_learns_alike_on_any_mesh(tmp_path: Path) -> None:
    steps = ("--steps", "40")
    alone = pipeline_gpt_losses(1, tmp_path, *steps)
    assert alone[1] < 0.8 * alone[0]
    assert pipeline_gpt_losses(8, tmp_path, *steps, "--out", "weights.safetensors") == pytest.approx(alone, rel=2e-3)
    assert load_file(tmp_path / "weights.safetensors")["blocks.7.attention.qkv.weight"].shape == (192, 64)
    # Two stages on each of two ranks save; of four ranks with data of their own, two by two, each goes on.
    half = ("--steps", "20", "--checkpoint", "saved")
    chunks = ("--schedule", "interleaved", "--chunks", "2", "--preset", "zero3")
    assert pipeline_gpt_losses(2, tmp_path, *half, *chunks) == pytest.approx(alone[:1], rel=2e-3)
    assert pipeline_gpt_losses(4, tmp_path, *half) == pytest.approx(alone[1:], rel=2e-3)
