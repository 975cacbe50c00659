"""A folder with more than one job's checkpoints: ranks that differ, other jobs, leftovers, links."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import npuzero
from npuzero import checkpoint, comm
from npuzero.checkpoint import folder, owner, saving
from npuzero.checkpoint.formats import item_files as files
from npuzero.comm import World
from npuzero.errors import CheckpointError

from .training import CheckpointTraining, DataPosition

RANKS = 2


def entry_names(path: Path) -> list[str]:
    return sorted(entry.name for entry in path.iterdir())


# -- ranks that save different things ----------------------------------------------------------------------------------


def without_optimizer(training: CheckpointTraining, path: Path, **options: Any) -> Any:
    return checkpoint.save(path, training.model, scheduler=training.scheduler, **options)


def save_training(training: CheckpointTraining, path: Path, **options: Any) -> Any:
    return training.save(path, options.pop("step"), **options)


OTHER_PARTS: dict[str, tuple[Callable[..., Any], dict[str, Any], str]] = {
    "no optimizer": (without_optimizer, {}, r"optim on ranks \[{}\], and none on ranks \[{}\]"),
    "no random numbers": (save_training, {"rng": False}, r"rng on ranks \[{}\], and none on ranks \[{}\]"),
    "no position": (save_training, {}, r"data on ranks \[{}\], and none on ranks \[{}\]"),
}


@pytest.mark.parametrize(
    ("case", "odd", "asynchronous"),
    [(case, 1, False) for case in OTHER_PARTS] + [("no optimizer", 0, False), ("no optimizer", 1, True)],
)
def test_a_rank_that_passes_other_parts_fails_the_save_and_the_last_good_one_stays(
    case: str, odd: int, asynchronous: bool, tmp_path: Path
) -> None:
    way, options, says = OTHER_PARTS[case]

    def rank(world: World) -> None:
        training = CheckpointTraining(world, "zero3")
        training.steps(0, 1)
        position = {"data": DataPosition()} if case == "no position" else {}
        training.save(tmp_path, 1, **position)
        chosen: dict[str, Any] = {"step": 2, "keep_last": 1, "asynchronous": asynchronous}
        with pytest.raises(CheckpointError, match=says.format(1 - odd, odd)):
            if world.rank == odd:
                way(training, tmp_path, **chosen, **options).wait()
            else:
                save_training(training, tmp_path, **chosen, **position).wait()
        world.exchange(None)
        assert entry_names(tmp_path) == ["step-00000001"]
        checkpoint.verify(tmp_path)
        assert training.load(tmp_path).step == 1
        training.save(tmp_path, 2, keep_last=1)

    comm.run_threads(RANKS, rank)
    assert entry_names(tmp_path) == ["step-00000002"]


def test_what_a_rank_wrote_is_compared_with_what_it_should_have_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Raise even if the ranks have agreed before."""
    monkeypatch.setattr(saving.SaveJob, "outline", lambda job: {})

    def rank(world: World) -> None:
        training = CheckpointTraining(world, "zero3")
        training.steps(0, 1)
        training.save(tmp_path, 1)
        with pytest.raises(CheckpointError, match=r"\d+ items from rank 1, as rank 0 has sharded the model; got \d+"):
            way = without_optimizer if world.rank else save_training
            way(training, tmp_path, step=2, keep_last=1)

    comm.run_threads(RANKS, rank)
    assert entry_names(tmp_path) == ["step-00000001"]


@pytest.mark.parametrize("damage", ("shortened", "gone"))
def test_no_old_checkpoint_goes_for_one_that_is_not_on_the_disk(
    damage: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stand in for a file system that loses data it has accepted."""
    end = files.DataFile.__exit__

    def lose(file: files.DataFile, *error: Any) -> None:
        end(file, *error)
        if file.path.name == files.data_file_name(1):
            os.truncate(file.path, 100) if damage == "shortened" else file.path.unlink()

    def rank(world: World) -> None:
        training = CheckpointTraining(world, "zero3")
        training.save(tmp_path, 1)
        world.exchange(None)
        if world.rank == 0:
            monkeypatch.setattr(files.DataFile, "__exit__", lose)
        world.exchange(None)
        with pytest.raises(CheckpointError, match=r"__1_0\.distcp"):
            training.save(tmp_path, 2, keep_last=1)
        assert training.load(tmp_path).step == 1

    comm.run_threads(RANKS, rank)
    assert entry_names(tmp_path) == ["step-00000001"]


# -- two jobs in one folder --------------------------------------------------------------------------------------------

_JOB = """
import os, pathlib, sys, time, npuzero
from checkpoint.training import CheckpointTraining

folder, gate = map(pathlib.Path, sys.argv[1:])
write = os.writev

def held(descriptor, pieces):
    gate.with_suffix(".writing").touch()
    while not gate.exists():
        time.sleep(0.01)
    return write(descriptor, pieces)

os.writev = held
training = CheckpointTraining(npuzero.comm.SingleWorld(), "zero3")
training.save(folder, 2)
gate.unlink()
gate.with_suffix(".saved").touch()
training.save(folder, 3)
"""


def wait_for_file(path: Path) -> None:
    deadline = time.monotonic() + 60.0
    while not path.exists():
        assert time.monotonic() < deadline, f"{path.name} does not come"
        time.sleep(0.01)
    path.unlink()


@pytest.fixture
def other_job(tmp_path: Path) -> Iterator[subprocess.Popen[bytes]]:
    """Save step 2 into ``run`` in another process, then step 3, each held until ``gate`` exists."""
    search = os.pathsep.join([str(Path(npuzero.__file__).parents[1]), str(Path(__file__).parents[1])])
    command = [sys.executable, "-c", _JOB, str(tmp_path / "run"), str(tmp_path / "gate")]
    job = subprocess.Popen(command, env={"PYTHONPATH": search})
    yield job
    job.kill()
    job.wait()


@pytest.mark.world
def test_a_job_that_saves_into_the_folder_of_another_hears_of_it(
    tmp_path: Path, other_job: subprocess.Popen[bytes]
) -> None:
    """While another job lives, an error names it, and its save succeeds. After its death its leftovers are removed."""
    run, gate = tmp_path / "run", tmp_path / "gate"
    training = CheckpointTraining(comm.SingleWorld(), "zero3")
    training.save(run, 1)
    says = rf"no other job is saving into; got a save under way by process {other_job.pid} on .*, since 20"
    wait_for_file(gate.with_suffix(".writing"))
    with pytest.raises(CheckpointError, match=says):
        training.save(run, 2, keep_last=1)
    gate.touch()
    wait_for_file(gate.with_suffix(".saved"))
    assert checkpoint.latest(run) == run / "step-00000002"
    checkpoint.verify(run)
    wait_for_file(gate.with_suffix(".writing"))
    with pytest.raises(CheckpointError, match=says):
        training.save(run, 3)
    other_job.kill()
    other_job.wait()
    training.save(run, 3, keep_last=2)
    assert entry_names(run) == ["step-00000002", "step-00000003"]
    checkpoint.verify(run)


def claimed_partial_folder(run: Path, **changes: Any) -> Path:
    """Create the leftovers of a job that ended during a save; ``changes`` edit its claim."""
    partial = folder.PartialCheckpoint(run, 7)
    (partial.path / "__0_0.distcp").write_bytes(b"half")
    partial.claim.release(forget=False)
    words = partial.claim.path
    words.write_text(json.dumps(json.loads(words.read_text()) | changes))
    return partial.path


def test_what_may_be_another_hosts_is_left_alone(tmp_path: Path) -> None:
    """Its lock means nothing here, and does not block a save."""
    theirs = claimed_partial_folder(tmp_path, host="elsewhere", boot="another")
    training = CheckpointTraining(comm.SingleWorld(), "zero3")
    training.save(tmp_path, 7, keep_last=1)
    assert (theirs / "__0_0.distcp").exists()
    checkpoint.verify(tmp_path)


@pytest.mark.parametrize(
    "changes",
    [{}, {"started": "1"}, {"pid": 2**22 + 1}, {"namespace": "a container", "pid": 1}],
    ids=["itself, failed", "the id of a later process", "no such process", "of a container of this host"],
)
def test_what_a_dead_job_left_goes(changes: dict[str, Any], tmp_path: Path) -> None:
    claimed_partial_folder(tmp_path, **changes)
    CheckpointTraining(comm.SingleWorld(), "zero3").save(tmp_path, 8)
    assert entry_names(tmp_path) == ["step-00000008"]


@pytest.mark.parametrize("words", (b"", b"{}", b"[" * 3000, b'{"host": 1}', b"\xff"))
def test_claims_that_nobody_can_read_are_in_nobodys_way(words: bytes, tmp_path: Path) -> None:
    claimed_partial_folder(tmp_path).with_name("x")
    (claim,) = tmp_path.glob("*.owner")
    claim.write_bytes(words)
    assert owner.read_claim(claim) == (owner.OwnerStatus.UNKNOWN, None)
    CheckpointTraining(comm.SingleWorld(), "zero3").save(tmp_path, 8)


def test_a_claim_of_nothing_by_nobody_goes(tmp_path: Path) -> None:
    """Create the leftovers of a process that is killed while it makes its claim."""
    (tmp_path / ".partial-step-00000007-0123456789abcdef.owner").touch()
    CheckpointTraining(comm.SingleWorld(), "zero3").save(tmp_path, 8)
    assert entry_names(tmp_path) == ["step-00000008"]


def test_a_claim_that_was_taken_for_a_dead_ones_is_made_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, write = tmp_path / "claim.owner", os.write
    taken = []

    def slowly(descriptor: int, words: bytes) -> int:
        if not taken:
            taken.append(path.unlink())
        return write(descriptor, words)

    monkeypatch.setattr(os, "write", slowly)
    claim = owner.ClaimFile(path)
    assert taken
    assert owner.read_claim(path)[0] is owner.OwnerStatus.ALIVE
    claim.release()
    assert not path.exists()


def test_another_job_that_was_quicker_keeps_its_checkpoint(tmp_path: Path) -> None:
    first, second = folder.PartialCheckpoint(tmp_path / "a", 5), folder.PartialCheckpoint(tmp_path / "b", 5)
    for partial in (first, second):
        files.write_durably(partial.path / files.MANIFEST, partial.path.name.encode())
    first.commit().rename(tmp_path / "b" / folder.step_folder_name(5))
    with pytest.raises(CheckpointError, match="a checkpoint of this step"):
        second.commit()
    for partial in (first, second):
        partial.drop()
    assert (tmp_path / "b/step-00000005/manifest.json").read_bytes() == first.path.name.encode()


# -- what is called like a checkpoint, and is none ---------------------------------------------------------------------


def a_file(path: Path) -> None:
    path.write_bytes(b"notes")


def a_link_to_nothing(path: Path) -> None:
    path.symlink_to("nowhere")


def a_link_to_itself(path: Path) -> None:
    path.symlink_to(path.name)


def an_empty_folder(path: Path) -> None:
    path.mkdir()


def a_half_copied_checkpoint(path: Path) -> None:
    path.mkdir()
    (path / "__0_0.distcp").write_bytes(b"half")
    (path / ".metadata").write_bytes(b"half")


LEFTOVERS = [a_file, a_link_to_nothing, a_link_to_itself, an_empty_folder, a_half_copied_checkpoint]


@pytest.mark.parametrize("leave", LEFTOVERS, ids=lambda leave: leave.__name__)
def test_leftovers_named_like_a_checkpoint_block_neither_saves_nor_resuming(
    leave: Callable[[Path], None], tmp_path: Path
) -> None:
    for name in ("step-00000100", "step-00000002", ".partial-step-00000002", ".partial-step-00000009-x.owner"):
        leave(tmp_path / name)

    def rank(world: World) -> None:
        training = CheckpointTraining(world, "zero3")
        kept: Any = {"model": training.model, "optimizer": training.optimizer, "scheduler": training.scheduler}
        with checkpoint.Checkpointer(tmp_path, every=1, keep_last=2, **kept) as checkpoints:
            assert checkpoints.resume() == 0
            for step in range(4):
                training.steps(step, step + 1)
                checkpoints.after(step + 1)
        with checkpoint.Checkpointer(tmp_path, every=1, **kept) as checkpoints:
            assert checkpoints.resume() == 4

    comm.run_threads(RANKS, rank)
    assert checkpoint.latest(tmp_path) == tmp_path / "step-00000004"
    found = [name for name in entry_names(tmp_path) if not name.startswith(".")]
    aside = [name for name in found if name.startswith("step-00000002.aside-")]
    assert [name for name in found if name not in aside] == ["step-00000003", "step-00000004", "step-00000100"]
    assert len(aside) == 1, "what a user has put there is kept"


def test_links_to_checkpoints_are_checkpoints(tmp_path: Path) -> None:
    training = CheckpointTraining(comm.SingleWorld(), "zero3")
    training.save(tmp_path / "archive", 5)
    run = tmp_path / "run"
    run.mkdir()
    (run / "step-00000005").symlink_to(tmp_path / "archive" / "step-00000005")
    assert training.load(run).step == 5
    for step in (6, 7):
        training.save(run, step, keep_last=1)
    assert entry_names(run) == ["step-00000005", "step-00000007"]
    checkpoint.verify(tmp_path / "archive")


def test_the_one_just_saved_is_kept_though_there_are_later_ones(tmp_path: Path) -> None:
    """Training went back to an earlier checkpoint, and continued from there."""
    training = CheckpointTraining(comm.SingleWorld(), "zero3")
    for step in (10, 20, 30):
        training.save(tmp_path, step)
    assert training.save(tmp_path, 15, keep_last=2).wait().exists()
    assert entry_names(tmp_path) == ["step-00000015", "step-00000030"]


def test_no_such_checkpoint_is_said_only_where_there_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    training = CheckpointTraining(comm.SingleWorld(), "zero3")
    with pytest.raises(CheckpointError, match="a complete checkpoint; got none: no such folder"):
        training.load(tmp_path / "nowhere")
    a_half_copied_checkpoint(tmp_path / "step-00000003")
    a_file(tmp_path / "step-00000004")
    says = r"got none, but step-00000003, a folder without manifest.json; step-00000004, no folder"
    with pytest.raises(CheckpointError, match=says):
        training.load(tmp_path)
    with pytest.raises(CheckpointError, match="which is a folder, or the folder of a run; got a file"):
        checkpoint.latest(tmp_path / "step-00000004")

    def refuse(path: Any) -> None:
        raise PermissionError(13, "Permission denied", str(path))

    with monkeypatch.context() as patched:
        patched.setattr(folder.os, "listdir", refuse)
        with pytest.raises(CheckpointError, match=r"a folder that can be read; got .*Permission denied"):
            training.load(tmp_path)
    path = training.save(tmp_path, 5).wait()
    (path / "manifest.json").unlink()
    (path / "manifest.json").symlink_to("nowhere")
    with pytest.raises(CheckpointError, match=r"manifest\.json: expected a readable file; got .*No such file"):
        training.load(path)


def test_a_folder_that_rank_0_cannot_read_is_an_error_on_every_rank(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def rank(world: World) -> None:
        training = CheckpointTraining(world, "zero3")
        kept: Any = {"model": training.model, "optimizer": training.optimizer}
        for way in (checkpoint.Checkpointer(tmp_path / ("x" * 300), every=1, **kept).resume, training.load):
            with pytest.raises(CheckpointError, match="File name too long"):
                way(tmp_path / ("x" * 300)) if way == training.load else way()

    comm.run_threads(RANKS, rank, timeout_s=10.0)
