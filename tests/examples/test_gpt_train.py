"""The example trains under torchrun and leaves what it promises; the demo puts the stages together."""

from __future__ import annotations

import json
import math
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import npuzero

GPT_FOLDER = Path(__file__).parents[2] / "examples" / "gpt"
TINY = ["--steps", "3", "--batch", "2", "--seq", "32", "--dim", "32", "--layers", "2", "--heads", "2", "--sample", "8"]
PARTS = {"parameters", "gradients", "states", "buffers"}


def run_process_group(command: list[str], timeout_s: float = 120) -> str:
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


def run_gpt_training(out: Path, *arguments: str, ranks: int = 2) -> dict[str, Any]:
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    run_process_group([*torchrun, str(GPT_FOLDER / "train.py"), *TINY, "--out", str(out), *arguments])
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


@pytest.mark.slow
@pytest.mark.world
def test_stages_train_alike_to_the_bit(tmp_path: Path) -> None:
    results = [run_gpt_training(tmp_path / preset, "--preset", preset) for preset in ("zero1", "zero3")]
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


@pytest.mark.slow
@pytest.mark.world
def test_trains_in_bfloat16_in_two_levels(tmp_path: Path) -> None:
    result = run_gpt_training(tmp_path, "--preset", "hsdp", "--local-size", "2", "--precision", "bf16", ranks=4)
    check_complete(result)
    assert result["ranks"] == 4


def test_trains_as_a_plain_process(tmp_path: Path) -> None:
    output = run_process_group([str(GPT_FOLDER / "train.py"), *TINY, "--out", str(tmp_path)])
    check_complete(json.loads((tmp_path / "result.json").read_text()))
    assert "tokens/s" in output


def read_gpt_steps(out: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (out / "steps.jsonl").read_text().splitlines()]


def test_a_finished_run_that_is_resumed_ends_at_once(tmp_path: Path) -> None:
    how = [*TINY, "--out", str(tmp_path), "--checkpoint-every", "3", "--checkpoint-dir", str(tmp_path / "saves")]
    run_process_group([str(GPT_FOLDER / "train.py"), *how])
    before = (tmp_path / "result.json").read_text(), read_gpt_steps(tmp_path)
    output = run_process_group([str(GPT_FOLDER / "train.py"), *how, "--resume"])
    assert f"The run in {tmp_path / 'saves'} is finished" in output
    assert ((tmp_path / "result.json").read_text(), read_gpt_steps(tmp_path)) == before


@pytest.mark.world
@pytest.mark.slow
def test_a_resumed_run_is_that_which_was_not_stopped_to_the_bit(tmp_path: Path) -> None:
    """Of five steps of two micro-batches each, the resumed run takes the last three."""
    how = ["--preset", "zero3", "--steps", "5", "--accumulate", "2", "--checkpoint-every", "2", "--sample", "0"]
    folder = tmp_path / "checkpoints"
    whole = run_gpt_training(tmp_path / "whole", *how, "--checkpoint-dir", str(folder))
    saved = sorted(path for path in folder.iterdir() if path.name.startswith("step-"))
    assert len(saved) == 2
    shutil.rmtree(saved[1])  # as if the run had been stopped before
    shutil.copytree(tmp_path / "whole", tmp_path / "resumed")
    resumed = run_gpt_training(tmp_path / "resumed", *how, "--checkpoint-dir", str(folder), "--resume")
    assert resumed["losses"] == whole["losses"] and resumed["held_out_loss"] == whole["held_out_loss"]
    lines = read_gpt_steps(tmp_path / "resumed")
    assert lines == read_gpt_steps(tmp_path / "whole")
    assert [line["step"] for line in lines] == [1, 2, 3, 4, 5]
    assert all(line.keys() == {"step", "loss", "norm", "skipped"} and not line["skipped"] for line in lines)
    weights = [load_file(tmp_path / out / "model.safetensors") for out in ("whole", "resumed")]
    assert weights[0].keys() == weights[1].keys()
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])


@pytest.mark.parametrize(
    "precision",
    [
        pytest.param(name, marks=() if name == "fp16" else pytest.mark.slow)
        for name in npuzero.PRECISIONS
        if name != "tf32"  # which the CPU refuses
    ],
)
def test_every_precision(precision: str, tmp_path: Path) -> None:
    """float16 begins with a scale that is too large: some steps are skipped, and said to be."""
    more = ["--precision", precision, "--steps", "20", "--lr", "1e-2"]
    run_process_group([str(GPT_FOLDER / "train.py"), *TINY, *more, "--out", str(tmp_path)])
    lines = read_gpt_steps(tmp_path)
    assert len(lines) == 20 and all(math.isfinite(line["loss"]) for line in lines)
    assert any(line["skipped"] for line in lines) == (precision == "fp16")
    assert all((line["norm"] is None) == line["skipped"] for line in lines)
    assert lines[-1]["loss"] < lines[0]["loss"]


def test_options_that_contradict_each_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import train as example

    with pytest.raises(npuzero.ConfigError, match="--resume: expected --checkpoint-dir"):
        example.check(example.Options(resume=True))
    with pytest.raises(npuzero.ConfigError, match="--precision"):
        example.check(example.Options(precision="fp12"))
    model = npuzero.zero(torch.nn.Linear(2, 2), world=npuzero.comm.SingleWorld())
    npuzero.checkpoint.save(tmp_path, model, step=2)
    with pytest.raises(npuzero.ConfigError, match="step-00000002, of another run"):
        example.check(example.Options(checkpoint_dir=str(tmp_path)))
    example.check(example.Options(checkpoint_dir=str(tmp_path), resume=True))
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with pytest.raises(npuzero.ConfigError, match="pip install tensorboard"):
        example.tensorboard_writer(tmp_path)


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
    output = run_process_group([str(GPT_FOLDER / "demo.py"), "--out", str(tmp_path), *TINY], timeout_s=400)
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
        run_process_group([str(GPT_FOLDER / "demo.py"), "--out", str(tmp_path), "--dim", "33"])
