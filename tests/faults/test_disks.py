"""Training with optimizer states in files on disks that fail: a typed error soon, no update of damaged states, no step
after a partial one, and no files left.
"""

from __future__ import annotations

import errno
import gc
import os
import re
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import npuzero
from faults import disks
from faults.dead_ranks import CULPRIT
from faults.disks import FAULTS, READABLE, Call, inject_disk_fault, settings_in
from faults.fault_ranks import ProcessOutcome, catch_fault, run_faulty_ranks
from npuzero import ConfigError, OutOfSpace, _native, checkpoint, comm
from npuzero.api.model import engine_of
from npuzero.comm import World
from npuzero.memory import BufferRing, FileStore
from world.test_optimizers import optimizer_state
from world.toy import build_seeded_model
from world.train import CutSession, State, assert_same_bits

SOON_S = 5.0
RANKS = 2
#: The error text of each fault.
SAYS = {
    "a full disk": ("OutOfSpace", "No space left"),
    "a bad sector that is written": ("StorageError", "Input/output error"),
    "a bad sector that is read": ("StorageError", "Input/output error"),
    "the end of the file": ("StorageError", "end of the file"),
    "a bit that is another": ("StorageError", "that were written"),
}
QUICK = ("a full disk", 0), ("a bad sector that is read", 5), ("a bit that is another", 5)


@pytest.fixture(autouse=True)
def folder(tmp_path: Path) -> Iterator[Path]:
    """Return a folder on a disk; at the end it must be empty, with no unnamed file open."""
    if _native.io.is_memory(str(tmp_path)):
        pytest.skip("the temporary folder is in memory")
    place = tmp_path / "nvme"
    place.mkdir()
    yield place
    _native.io.heal()
    assert_gone(lambda: count_nameless_files(tmp_path) == 0)
    assert not place.is_dir() or not os.listdir(place)


def count_nameless_files(folder: Path) -> int:
    """Return how many unnamed files this process has open there."""
    found = 0
    for link in Path("/proc/self/fd").iterdir():
        try:
            target = os.readlink(link)
        except FileNotFoundError:  # the descriptor of the listing itself
            continue
        found += target.startswith(str(folder)) and target.endswith("(deleted)")
    return found


def assert_gone(gone: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 30
    while not gone() and time.monotonic() < deadline:
        gc.collect()
        time.sleep(0.01)
    assert gone()


class DiskTraining:
    """Hold a model in training on one rank, with optimizer states in a folder."""

    def __init__(self, world: World, folder: Path, seed: int = 0, **settings: Any) -> None:
        self.session = CutSession(
            build_seeded_model(seed), world, plan=READABLE, settings=settings_in(folder, **settings)
        )
        self.optimizer = self.session.optimizer(torch.optim.AdamW, lr=1e-2)

    def step(self, step: int) -> None:
        self.session.loss(step).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def steps(self, first: int, last: int) -> None:
        for step in range(first, last):
            self.step(step)

    def outcome(self) -> State:
        return self.session.state() | optimizer_state(self.optimizer)

    def resting(self) -> list[Tensor]:
        """Copy the parameters as they are in memory, updated or not."""
        return [flat.own_parameters.clone() for flat in engine_of(self.session.model).flats()]


def run_single_rank(body: Callable[[World], Any]) -> Any:
    return comm.run_threads(1, body)[0]


def train_without_faults(folder: Path, last: int) -> State:
    def rank(world: World) -> State:
        training = DiskTraining(world, folder)
        training.steps(0, last)
        return training.outcome()

    return run_single_rank(rank)


# --- in the update ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fault", "after"),
    [
        pytest.param(fault, after, marks=() if (fault, after) in QUICK else pytest.mark.slow)
        for fault in FAULTS
        for after in (0, 5)
    ],
)
def test_a_disk_that_fails_in_an_update(fault: str, after: int, folder: Path, tmp_path: Path) -> None:
    """Updated parameters are right, damaged ones unchanged; every call is refused; a checkpoint resumes training."""

    def rank(world: World) -> tuple[list[Tensor], list[Tensor], list[Any]]:
        training = DiskTraining(world, folder)
        training.steps(0, 2)
        checkpoint.save(tmp_path / "saved", training.session.model, training.optimizer, step=2)
        before = training.resting()
        training.session.loss(2).backward()
        inject_disk_fault(fault, after)
        seen = [catch_fault(training.optimizer.step)]
        calls = [
            lambda: training.session.loss(3),
            training.session.state,
            training.optimizer.state_dict,
            lambda: checkpoint.save(tmp_path / "broken", training.session.model, training.optimizer, step=3),
            lambda: npuzero.report(training.session.model),
            training.optimizer.step,
        ]
        seen += [catch_fault(call) for call in calls]
        return before, training.resting(), seen

    def good(world: World) -> list[Tensor]:
        training = DiskTraining(world, folder)
        training.steps(0, 3)
        training.session.state()
        return training.resting()

    def goes_on(world: World) -> State:
        training = DiskTraining(world, folder, seed=1)
        checkpoint.load(tmp_path / "saved", training.session.model, training.optimizer)
        training.steps(2, 4)
        return training.outcome()

    before, found, (first, *later) = run_single_rank(rank)
    kind, says = SAYS[fault]
    assert first.kind in ("", kind), first.trace
    for seen in later:
        assert seen.kind == kind, seen.trace
        assert re.search(f"{folder}.*{says}", seen.text) and all(map(str.strip, seen.parts)), seen.text
        assert "checkpoint" in seen.parts[2], seen.parts
        assert seen.after_s < SOON_S
    _native.io.heal()
    some = 0
    for old, new, mine in zip(before, run_single_rank(good), found, strict=True):
        assert ((mine == old) | (mine == new)).all(), "an update of damaged states"
        some += int((mine == old).sum())
    assert some, "the update was to fail"
    assert_same_bits(run_single_rank(goes_on), train_without_faults(folder, 4))


def test_a_damaged_state_is_found_before_anything_is_updated(folder: Path) -> None:
    def rank(world: World) -> None:
        training = DiskTraining(world, folder)
        training.steps(0, 2)
        training.outcome()  # reads again the states that were read for the next update
        before = training.resting()
        training.session.loss(2).backward()
        inject_disk_fault("a bit that is another")
        with pytest.raises(npuzero.StorageError, match="that were written"):
            training.optimizer.step()
            training.session.loss(3)
        assert all(map(torch.equal, training.resting(), before))

    run_single_rank(rank)


def test_short_transfers_and_signals_move_no_bit(folder: Path) -> None:
    expected = train_without_faults(folder, 3)
    for call in (Call.read, Call.write):
        _native.io.inject(call, times=100, most=4096)
    for call in (Call.nameless, Call.allocate, Call.read, Call.write):
        _native.io.inject(call, times=500, error=errno.EINTR)
    assert_same_bits(train_without_faults(folder, 3), expected)


# --- between updates --------------------------------------------------------------------------------------------------


def test_what_was_written_between_steps_and_does_not_reach_the_disk(folder: Path) -> None:
    """An update that fails at its start changes nothing: no step follows it."""

    def rank(world: World) -> None:
        training = DiskTraining(world, folder)
        training.steps(0, 2)
        training.optimizer.load_state_dict(training.optimizer.state_dict())
        training.session.loss(2).backward()
        inject_disk_fault("a bad sector that is written")
        for _ in range(2):
            with pytest.raises(npuzero.StorageError, match="Input/output error"):
                training.optimizer.step()
                training.session.loss(3)

    run_single_rank(rank)


# --- at the start -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("store", [0, 1], ids=["masters, in zero()", "moments, in the first step"])
def test_a_disk_that_is_full_at_the_start(store: int, folder: Path) -> None:
    """The user gets a typed error; when there is room the same call succeeds, with identical bits."""

    def rank(world: World) -> State:
        _native.io.inject(Call.allocate, after=store, error=errno.ENOSPC)
        model = build_seeded_model()
        options = {"plan": READABLE, "world": world, "settings": settings_in(folder)}
        if store == 0:
            with pytest.raises(OutOfSpace, match=f"{folder}.*No space left") as met:
                npuzero.zero(model, **options)
            assert met.value.facts["needed"] > 0
        training = DiskTraining(world, folder)
        if store == 1:
            training.session.loss(0).backward()
            with pytest.raises(OutOfSpace, match=f"{folder}.*No space left"):
                training.optimizer.step()
            training.optimizer.step()
            training.optimizer.zero_grad()
        training.steps(store, 3)
        return training.outcome()

    assert_same_bits(run_single_rank(rank), train_without_faults(folder, 3))


@pytest.mark.skipif(not os.path.isdir("/dev/shm") or not _native.io.is_memory("/dev/shm"), reason="no tmpfs")
def test_a_folder_in_memory() -> None:
    with pytest.raises(ConfigError, match="tmpfs"):
        run_single_rank(lambda world: DiskTraining(world, Path("/dev/shm")))


def test_a_folder_that_is_removed_under_way(folder: Path) -> None:
    expected = train_without_faults(folder, 4)

    def rank(world: World) -> State:
        training = DiskTraining(world, folder)
        training.steps(0, 2)
        folder.rmdir()
        training.steps(2, 4)
        return training.outcome()

    assert_same_bits(run_single_rank(rank), expected)


def test_two_trainings_in_one_folder(folder: Path) -> None:
    expected = train_without_faults(folder, 3)

    def rank(world: World) -> list[State]:
        both = [DiskTraining(world, folder) for _ in range(2)]
        for step in range(3):
            for training in both:
                training.step(step)
        return [training.outcome() for training in both]

    for found in run_single_rank(rank):
        assert_same_bits(found, expected)


# --- the end ----------------------------------------------------------------------------------------------------------


def find_update_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "npuzero-update"]


@pytest.mark.parametrize("fault", [pytest.param(None, marks=pytest.mark.slow), "a bad sector that is written"])
def test_a_model_that_is_dropped_in_an_update_takes_all_with_it(fault: str | None, folder: Path) -> None:
    """Thread, files and buffers are freed, both during an update and after a failed one."""
    gc.collect()

    def rank(world: World) -> None:
        training = DiskTraining(world, folder)
        training.steps(0, 2)
        training.session.loss(2).backward()
        assert count_nameless_files(folder) == 2 and find_update_threads()
        if fault is not None:
            inject_disk_fault(fault, after=2)
        training.optimizer.step()
        del training
        assert_gone(lambda: not find_update_threads() and count_nameless_files(folder) == 0)
        assert not [thing for thing in gc.get_objects() if type(thing) in (FileStore, BufferRing)]

    run_single_rank(rank)


# --- on several ranks -------------------------------------------------------------------------------------------------


@pytest.mark.world
@pytest.mark.parametrize("fault", FAULTS)
def test_one_rank_whose_disk_fails(fault: str, folder: Path) -> None:
    outcomes = run_faulty_ranks(disks.disk_fails, RANKS, "zero3", folder, fault)
    assert_known(outcomes, *SAYS[fault])


@pytest.mark.world
@pytest.mark.parametrize("where", ["zero", "step"])
def test_one_rank_whose_disk_is_full(where: str, folder: Path) -> None:
    outcomes = run_faulty_ranks(disks.disk_is_full, RANKS, "zero3", folder, where)
    assert_known(outcomes, "OutOfSpace", "File too large")


def assert_known(outcomes: list[ProcessOutcome], kind: str, says: str) -> None:
    """The culprit reports the cause; the remaining ranks soon report that it is dead."""
    assert all(outcome.exit_code == 0 for outcome in outcomes), outcomes
    for rank, outcome in enumerate(outcomes):
        expected, words = (kind, says) if rank == CULPRIT else ("CollectiveError", f"rank {CULPRIT}")
        assert outcome.seen.kind == expected, outcome.seen.trace
        assert re.search(words, outcome.seen.text) and all(map(str.strip, outcome.seen.parts)), outcome.seen.text
        assert outcome.ended_s - outcomes[CULPRIT].ended_s < SOON_S
