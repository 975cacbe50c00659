"""Changed bytes and truncated files are detected and named, in any part of a checkpoint."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp

import npuzero
from npuzero import checkpoint, comm
from npuzero.comm import World
from npuzero.errors import CheckpointError, StateError

from .training import CheckpointTraining, DataPosition

PROGRAM = Path(__file__).with_name("damage.py")


def save_for_damage(folder: Path, foreign: bool) -> Path:
    """Save a checkpoint by two ranks: npuzero's format, or torch's of the same state on one rank."""

    def rank(world: World) -> None:
        training = CheckpointTraining(world, "zero3")
        training.steps(0, 1)
        training.save(folder, 1, data=DataPosition(world.rank), extra={"a": [1, 2.5, "b"]})

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


def run_damage_trials(folder: Path, trials: int, seed: int = 0) -> Counter[str]:
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
    assert run_damage_trials(save_for_damage(tmp_path, foreign=False), trials) == {"detected": trials}


@pytest.mark.world
@pytest.mark.filterwarnings("ignore::UserWarning:torch.*")
@pytest.mark.parametrize("trials", (8, pytest.param(1000, marks=pytest.mark.slow)))
def test_torchs_is_detected_or_harmless(trials: int, tmp_path: Path) -> None:
    """torch's format has checksums only within each item."""
    assert run_damage_trials(save_for_damage(tmp_path, foreign=True), trials)["detected"] > trials / 4


@pytest.mark.parametrize("plan", ("zero1", "zero3", "offload3"))
def test_a_half_loaded_model_is_refused_until_another_load_succeeds(plan: str, tmp_path: Path) -> None:
    run, other = tmp_path / "run", tmp_path / "other"

    def rank(world: World) -> None:
        training = CheckpointTraining(world, plan)
        training.steps(0, 2)
        training.save(run, 2)
        training.save(other, 2)
        if world.rank == 0:
            _damage_values(next(run.iterdir()))
        world.exchange(None)
        expected = training.state()
        with pytest.raises(CheckpointError, match="step-00000002"):
            training.load(run)
        uses = {
            "forward": partial(training.steps, 2, 3),
            "checkpoint.save": partial(training.save, run, 3),
            "full_state_dict": training.state,
            "checkpoint.load": partial(checkpoint.load, other, training.model),  # leaves states half loaded
        }
        for call, use in uses.items():
            with pytest.raises(StateError, match=r"checkpoint\.load has failed before") as refused:
                use()
            assert call in str(refused.value)
        training.load(other)
        state = training.state()
        assert all(torch.equal(state[name], expected[name]) for name in expected)
        training.steps(2, 3)

    comm.run_threads(2, rank)


def _damage_values(path: Path) -> None:
    """Change a byte in the middle of the optimizer states, which are loaded after the parameters."""
    for file in path.glob("*.distcp"):
        raw = bytearray(file.read_bytes())
        raw[len(raw) // 2] ^= 1
        file.write_bytes(raw)
