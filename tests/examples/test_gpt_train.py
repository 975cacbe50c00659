"""The example trains under torchrun and leaves what it promises; the demo puts the stages together."""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

GPT_FOLDER = Path(__file__).parents[2] / "examples" / "gpt"
TINY = ["--steps", "3", "--batch", "2", "--seq", "32", "--dim", "32", "--layers", "2", "--heads", "2", "--sample", "8"]
PARTS = {"parameters", "gradients", "states", "buffers"}


def launch(command: list[str], timeout_s: float = 120) -> str:
    """Run ``command`` and return what it printed; it and all its children are gone afterwards, whatever happens."""
    process = subprocess.Popen(
        [sys.executable, *command],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        output, _ = process.communicate()
        pytest.fail(f"still running after {timeout_s} s; it said:\n{output[-4000:]}")
    assert process.returncode == 0, f"exit code {process.returncode}; it said:\n{output[-4000:]}"
    return output


def train(out: Path, *arguments: str, ranks: int = 2) -> dict[str, Any]:
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    launch([*torchrun, str(GPT_FOLDER / "train.py"), *TINY, "--out", str(out), *arguments])
    return json.loads((out / "result.json").read_text())


def check_complete(result: dict[str, Any]) -> None:
    assert len(result["losses"]) == 3
    assert all(math.isfinite(loss) for loss in result["losses"])
    assert result["losses"][0] == pytest.approx(math.log(256), abs=1)
    assert result["tokens_per_s"] > 0
    assert result["sample"].startswith("def ")
    assert result["held_out_loss_reloaded"] == pytest.approx(result["held_out_loss"], rel=1e-5)
    for source in ("measured", "predicted"):
        assert set(result["bytes_held"][source]) == PARTS
    assert result["bytes_sent"]["measured"] == result["bytes_sent"]["predicted"]


@pytest.mark.world
def test_stages_train_alike_to_the_bit(tmp_path: Path) -> None:
    results = [train(tmp_path / preset, "--preset", preset) for preset in ("zero1", "zero3")]
    for result in results:
        check_complete(result)
        assert result["ranks"] == 2
    whole, cut = results
    assert whole["losses"] == cut["losses"]
    assert whole["held_out_loss"] == cut["held_out_loss"]
    assert cut["bytes_held"]["measured"]["parameters"] < whole["bytes_held"]["measured"]["parameters"]
    weights = [load_file(tmp_path / preset / "model.safetensors") for preset in ("zero1", "zero3")]
    assert weights[0].keys() == weights[1].keys()
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])


@pytest.mark.world
def test_trains_in_bfloat16_in_two_levels(tmp_path: Path) -> None:
    result = train(tmp_path, "--preset", "hsdp", "--local-size", "2", "--precision", "bf16", ranks=4)
    check_complete(result)
    assert result["ranks"] == 4


def test_trains_as_a_plain_process(tmp_path: Path) -> None:
    output = launch([str(GPT_FOLDER / "train.py"), *TINY, "--out", str(tmp_path)])
    check_complete(json.loads((tmp_path / "result.json").read_text()))
    assert "tokens/s" in output


def test_exported_weights_are_those_of_the_state(tmp_path: Path) -> None:
    from export import load_weights, save_weights
    from model import GPT, GPTConfig
    from safetensors import safe_open

    model = GPT(GPTConfig(dim=32, layers=2, heads=2))
    save_weights(tmp_path / "model.safetensors", model.config, model.state_dict())
    loaded = load_weights(tmp_path / "model.safetensors")
    assert loaded.config == model.config
    assert loaded.head.weight is loaded.embedding.weight
    for (name, weight), (_, again) in zip(model.named_parameters(), loaded.named_parameters(), strict=True):
        assert torch.equal(weight, again), name
    with safe_open(tmp_path / "model.safetensors", framework="pt") as file:
        assert set(file.keys()) == {name for name, _ in model.named_parameters()}


@pytest.mark.slow
@pytest.mark.world
def test_the_demo_leaves_summary_picture_and_weights(tmp_path: Path) -> None:
    output = launch([str(GPT_FOLDER / "demo.py"), "--out", str(tmp_path), *TINY], timeout_s=400)
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert list(summary["stages"]) == ["zero0", "zero1", "zero2", "zero3"]
    assert summary["largest_difference_between_stages"] == 0
    assert summary["held_out_loss"] == summary["stages"]["zero3"]["held_out_loss"]
    assert (tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG")
    assert (tmp_path / "model.safetensors").stat().st_size > 0
    assert "def " in output


@pytest.mark.slow
def test_a_failing_run_fails_the_demo(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match=r"(?s)dim 33 must be.*ended with exit code 1"):
        launch([str(GPT_FOLDER / "demo.py"), "--out", str(tmp_path), "--dim", "33"])
