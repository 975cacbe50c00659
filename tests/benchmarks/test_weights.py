"""Whole weights go out of a cut model and in again without ever being whole."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from examples.test_gpt_train import run_process_group


@pytest.mark.slow
@pytest.mark.world
def test_peaks_beyond_the_shard(tmp_path: Path) -> None:
    """Export and import take less than a tensor and a constant; initialisation some units, and never the model."""
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    out = tmp_path / "weights.json"
    run_process_group([*torchrun, "-m", "benchmarks.weights", "--width", "2048", "--layers", "16", "--out", str(out)])
    figures = json.loads(out.read_text())
    tensor, model = figures["tensor_bytes"], figures["model_bytes"]
    assert model == 16 * tensor
    assert figures["export"]["beyond_bytes"] < tensor + (16 << 20)
    assert figures["import"]["beyond_bytes"] < tensor + (16 << 20)
    assert figures["initialise"]["beyond_bytes"] < model / 2
    assert figures["import"]["kept_bytes"] < model / 2 + (16 << 20), "the shard, and nothing of the gradients yet"
