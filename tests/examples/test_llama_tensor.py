"""The Llama over tensor ranks: it learns, alike on one rank and on four, and leaves whole weights."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from safetensors.torch import load_file

from examples.pages import ROOT, run_script

SCRIPT = ROOT / "examples" / "llama_tensor" / "train.py"


def first_last_losses(ranks: int, folder: Path, *arguments: str) -> tuple[float, float]:
    printed = run_script(SCRIPT, ranks, folder, *arguments)
    found = re.search(r"loss ([\d.]+) -> ([\d.]+)", printed)
    assert found is not None, printed
    return float(found[1]), float(found[2])


@pytest.mark.world
@pytest.mark.slow
def test_it_learns_on_four_ranks_and_on_one(tmp_path: Path) -> None:
    first, last = first_last_losses(4, tmp_path, "--out", "weights.safetensors")
    assert last < 0.6 * first
    assert load_file(tmp_path / "weights.safetensors")["model.layers.0.self_attn.q_proj.weight"].shape == (64, 64)
    first, last = first_last_losses(1, tmp_path, "--tensor", "1")
    assert last < 0.6 * first
