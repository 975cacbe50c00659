"""Bytes that changed, files that end early: detected and named, whatever they would have meant."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
import torch.distributed.checkpoint as dcp

import npuzero
from npuzero import checkpoint, comm
from npuzero.comm import World

from .training import Position, Training

PROGRAM = Path(__file__).with_name("damage.py")


def save(folder: Path, foreign: bool) -> Path:
    """A checkpoint by two ranks: ours, or what torch makes of the same state on one."""

    def rank(world: World) -> None:
        training = Training(world, "zero3")
        training.steps(0, 1)
        training.save(folder, 1, data=Position(world.rank), extra={"a": [1, 2.5, "b"]})

    comm.run_threads(2, rank)
    path = checkpoint.latest(folder)
    assert path is not None
    if not foreign:
        return path
    state: dict[str, object] = {}
    dcp.state_dict_loader._load_state_dict(
        state, dcp.FileSystemReader(path), no_dist=True, planner=dcp.default_planner._EmptyStateDictLoadPlanner()
    )
    dcp.save(
        {key: state[key] for key in ("model", "optim", "scheduler")}, checkpoint_id=folder / "foreign", no_dist=True
    )
    return folder / "foreign"


def outcomes(folder: Path, trials: int, seed: int = 0) -> Counter[str]:
    command = [sys.executable, str(PROGRAM), str(folder), str(seed), str(trials)]
    search = ":".join([str(Path(npuzero.__file__).parents[1]), str(PROGRAM.parents[1])])
    done = subprocess.run(command, capture_output=True, text=True, env={"PYTHONPATH": search}, timeout=1800)
    assert done.returncode == 0, done.stdout[-500:] + done.stderr[-3000:]
    *lines, last = done.stdout.splitlines()
    assert last == "done" and len(lines) == trials
    missed = [line for line in lines if "missed" in line]
    assert not missed, missed
    return Counter(line.rpartition(": ")[2] for line in lines)


@pytest.mark.world
@pytest.mark.parametrize("trials", (15, pytest.param(1000, marks=pytest.mark.slow)))
def test_ours_is_checked_before_it_is_used(trials: int, tmp_path: Path) -> None:
    assert outcomes(save(tmp_path, foreign=False), trials) == {"detected": trials}


@pytest.mark.world
@pytest.mark.filterwarnings("ignore::UserWarning:torch.*")
@pytest.mark.parametrize("trials", (8, pytest.param(1000, marks=pytest.mark.slow)))
def test_torchs_is_detected_or_harmless(trials: int, tmp_path: Path) -> None:
    """It has checksums of its own in each item only."""
    assert outcomes(save(tmp_path, foreign=True), trials)["detected"] > trials / 4
