"""Kill ranks at any time, any number of times: the next life resumes from the last complete checkpoint."""

from __future__ import annotations

import random
import time
from pathlib import Path

import pytest

from npuzero import checkpoint, comm

from .lives import RankProcesses, StagedTraining, checkpoint_step, training_digest

pytestmark = pytest.mark.world

#: A life ends after up to this many saves, within this many seconds: about the time of one save.
SAVES = 2
MOMENT_S = 0.1


@pytest.mark.parametrize(
    ("ranks", "plan", "kills"),
    [
        (2, "zero3", 6),
        pytest.param(2, "zero1", 80, marks=pytest.mark.slow),
        pytest.param(1, "zero0", 60, marks=pytest.mark.slow),
        pytest.param(3, "zero3", 60, marks=pytest.mark.slow),
        pytest.param(2, "infinity-states", 40, marks=pytest.mark.slow),
        (2, "staged zero2 1f1b", 4),
        pytest.param(4, "staged zero3 interleaved", 50, marks=pytest.mark.slow),
    ],
)
def test_resumes_from_the_last_complete_one(ranks: int, plan: str, kills: int, tmp_path: Path) -> None:
    chance = random.Random(kills)
    folder = tmp_path / "run"
    last, there = 0, 2
    for _ in range(kills):
        job = RankProcesses(ranks, folder, plan)
        try:
            assert job.resumed() == [last] * ranks
            wanted = last + chance.randint(0, SAVES)
            job.await_save(folder, wanted)
            time.sleep(chance.random() * MOMENT_S)
        finally:
            job.kill(chance)
        found = checkpoint.latest(folder)
        last = checkpoint_step(found)
        assert last >= wanted, "a complete checkpoint is lost"
        if found:
            checkpoint.verify(found)
            kept = [path.name for path in folder.iterdir() if not path.name.startswith(".")]
            # A life may end after a state is complete and before the oldest one is removed.
            assert len(kept) <= max(2, there) + 1, kept
            there = len(kept)
            assert len(list(folder.iterdir())) <= there + 2, "leftovers pile up"
    assert [path.name for path in tmp_path.iterdir()] == ["run"], "states stay on the disk"
    if plan.startswith("staged"):
        comm.run_threads(
            ranks,
            lambda world: _is_as_never_killed(StagedTraining.of(world, plan), StagedTraining.of(world, plan), folder),
        )


def _is_as_never_killed(one: StagedTraining, other: StagedTraining, folder: Path) -> None:
    found = one.load(folder)
    other.steps(0, found.step)
    assert training_digest(one) == training_digest(other)
