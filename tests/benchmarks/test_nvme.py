"""The comparison of states on a disk: who takes part, how DeepSpeed is tuned; mapped states train as plain ones."""

from __future__ import annotations

import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from benchmarks.peers import nvme, offloaded
from benchmarks.peers.environments import DEEPSPEED, NotInstalled
from benchmarks.step.contenders import TrainSteps, plain_steps
from benchmarks.step.workload import GPTWorkload, gpt_loss
from npuzero.bench import Record
from npuzero.errors import BenchmarkError

SMALL = GPTWorkload(dim=16, layers=2, heads=2, vocabulary=32, sequence=8, batch=2)


def test_deepspeed_has_its_environment_and_settings(tmp_path: Path) -> None:
    entry = nvme.nvme_entry("deepspeed", tmp_path, {"aio": {"queue_depth": 8}})
    assert entry.python == str(DEEPSPEED.python) and entry.peer and entry.group is None
    assert entry.variables["NPUZERO_NVME_PATHS"] == str(tmp_path)
    assert '"queue_depth": 8' in entry.variables[offloaded.TUNING]


def test_the_quickest_settings_of_each_kind_are_found() -> None:
    def update_s(settings: dict[str, Any]) -> float:
        if settings["aio"]["queue_depth"] == 8:
            raise BenchmarkError("aio", expected="an update", got="none", do="")
        pipelined = "pipeline_read" in settings["offload_optimizer"]
        return settings["aio"]["block_size"] / 2**20 + 4 * pipelined + settings["sub_group"]["sub_group_size"] / 1e9

    settings, tried = nvme.tune_deepspeed(update_s)
    assert settings["aio"]["block_size"] == 2**20 and settings["aio"]["queue_depth"] == 32
    assert "pipeline_read" not in settings["offload_optimizer"] and settings["sub_group"] == {"sub_group_size": 10**7}
    assert len(tried) == 5 and ["failed" in each for each in tried].count(True) == 1


def test_where_no_settings_work_the_reason_is_told() -> None:
    def update_s(settings: dict[str, Any]) -> float:
        raise BenchmarkError("aio", expected="an update", got="no libaio", do="")

    with pytest.raises(NotInstalled, match="no libaio"):
        nvme.tune_deepspeed(update_s)


def test_an_unknown_contender_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        nvme.main(["--folder", ".", "--contenders", "npuzero,zenflow"])
    assert "zenflow" in capsys.readouterr().err


def train_few_steps(steps: TrainSteps) -> Tensor:
    """All parameters after a few steps."""
    for step in range(4):
        gpt_loss(steps.model, SMALL.tokens(0, step)).backward()
        steps.update()
    return torch.cat([parameter.detach().float().reshape(-1) for parameter in steps.model.parameters()])


@pytest.mark.parametrize("name", nvme.MAPPED)
@pytest.mark.parametrize(("precision", "apart"), [("fp32", 1e-6), ("bf16", 2e-4)])
def test_mapped_states_train_as_plain_ones(
    name: str, precision: str, apart: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NPUZERO_NVME_PATHS", str(tmp_path))
    workload = GPTWorkload(**{**vars(SMALL), "precision": precision})
    plain = train_few_steps(plain_steps(workload.model(), workload.hyper, workload.dtype))
    found = train_few_steps(offloaded.CONTENDERS[name]()(workload.model(), workload))
    assert (found - plain).abs().max() <= apart
    first = torch.cat([parameter.detach().reshape(-1) for parameter in workload.model().parameters()])
    assert (found - first).abs().max() > 4 * apart, "they have been trained"
    assert list(tmp_path.iterdir()) == [], "files without names"


@pytest.mark.slow
def test_a_whole_run(tmp_path: Path) -> None:
    """Mapped states have a cap, and their bytes come from the disk as often as npuzero's do."""
    out = tmp_path / "nvme.json"
    tiny = "--dim 128 --layers 3 --heads 2 --sequence 16 --batch 1 --rounds 1 --precision fp32"
    who = "npuzero,npuzero-blocking,mapped,mapped-dropped"
    folder = ["--folder", str(tmp_path), "--contenders", who]
    command = [sys.executable, "-m", "benchmarks.peers.nvme", *shlex.split(tiny), *folder, "--out", str(out)]
    subprocess.run(command, check=True, timeout=400)
    record = Record.read(out)
    steps, update = (record.result(f"nvme/{what}-fp32-1") for what in ("step", "update"))
    assert set(update.seconds) == {*who.split(",")} - {"npuzero"} - {*steps.parameters["missing"]}
    disk = steps.values["npuzero-blocking"]["disk_bytes"]
    assert disk["read"] == disk["written"] > 8 * 128 * 128 * 36, "8 bytes of each element of the matrices"
    assert steps.values["mapped-dropped"]["disk_bytes"]["written"] > disk["written"]
