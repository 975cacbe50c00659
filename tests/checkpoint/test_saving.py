"""Saves that overlap training, saves that fail on one rank, and which checkpoints are kept or removed."""

from __future__ import annotations

import errno
import itertools
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

import npuzero
from npuzero import checkpoint, comm
from npuzero.checkpoint import saving
from npuzero.checkpoint.formats import item_files as files
from npuzero.comm import World
from npuzero.errors import CheckpointError, ConfigError
from npuzero.shard.find_engine import engine_of
from world.toy import build_seeded_model
from world.train import assert_same_bits

from .training import CheckpointTraining, DataPosition

RANKS = 2


def tensors_without_losses(training: CheckpointTraining) -> dict[str, torch.Tensor]:
    return {name: value for name, value in training.state().items() if name != "losses"}


class CallGate:
    """Block the callers of a function after ``free`` calls until opened; by default, the writers of files."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, owner: Any = os, name: str = "writev", free: int = 0) -> None:
        self._open = threading.Event()
        self.close()
        call = getattr(owner, name)

        def held(*args: Any) -> Any:
            if next(self._calls) >= free:
                assert self._open.wait(20.0)
            return call(*args)

        monkeypatch.setattr(owner, name, held)

    def open(self) -> None:
        self._open.set()

    def close(self) -> None:
        self._calls = itertools.count()
        self._open.clear()


@pytest.mark.parametrize("plan", ("zero1", "zero3"))
def test_what_is_saved_beside_training_is_the_state_at_the_call(
    plan: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = CallGate(monkeypatch)

    def rank(world: World) -> None:
        training = CheckpointTraining(world, plan)
        training.steps(0, 1)
        expected = tensors_without_losses(training)
        save = training.save(tmp_path, 1, asynchronous=True)
        training.steps(1, 3)
        assert not save.done() and checkpoint.latest(tmp_path) is None
        world.exchange(None)
        gate.open()
        assert save.wait() == tmp_path / "step-00000001"
        training.load(tmp_path)
        assert_same_bits(tensors_without_losses(training), expected)

    comm.run_threads(RANKS, rank)


class ForwardCounter(torch.nn.Module):
    """Count the forwards in a buffer, as BatchNorm does."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(7))
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self) -> torch.Tensor:
        self.calls += 1
        return self.weight.square().sum()


def test_buffers_and_options_are_those_at_the_call_however_late_the_writer_begins(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begin, run = threading.Event(), saving.Saving.run

    def late(save: saving.Saving, work: Any, *, beside: bool) -> None:
        run(save, lambda: (begin.wait(20.0), work()), beside=beside)

    monkeypatch.setattr(saving.Saving, "run", late)

    def made(world: World) -> tuple[Any, Any, Any]:
        model = npuzero.zero(build_seeded_model(0, ForwardCounter), stage=3, world=world)
        optimizer = npuzero.AdamW(model.parameters(), lr=1e-2)
        return model, optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)

    def rank(world: World) -> None:
        model, optimizer, scheduler = made(world)
        extra = {"seen": [1]}
        for step in (1, 2):
            model().backward()
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()
            if step == 1:
                save = checkpoint.save(
                    tmp_path, model, optimizer, step=1, scheduler=scheduler, extra=extra, asynchronous=True
                )
                extra["seen"].append(2)
        world.exchange(None)
        begin.set()
        save.wait()
        model, optimizer, scheduler = made(world)
        found = checkpoint.load(tmp_path, model, optimizer, scheduler=scheduler)
        assert (found.step, found.extra) == (1, {"seen": [1]})
        assert int(model.calls) == 1
        assert optimizer.param_groups[0]["lr"] == scheduler.get_last_lr()[0] == 5e-3
        assert scheduler.last_epoch == 1

    comm.run_threads(RANKS, rank)


def test_snapshots_share_their_memory(tmp_path: Path) -> None:
    def rank(world: World) -> None:
        training = CheckpointTraining(world, "zero3")
        addresses = set()
        for step in range(1, 4):
            training.steps(step - 1, step)
            training.save(tmp_path, step, asynchronous=True, keep_last=1)
            blocks = saving.get_saver(engine_of(training.model)).copies.blocks
            addresses.add(tuple(block.data_ptr() for block in blocks))
        assert len(addresses) == 1
        saving.get_saver(engine_of(training.model)).finish()
        assert [path.name for path in tmp_path.iterdir()] == ["step-00000003"]

    comm.run_threads(1, rank)


def full_disk(monkeypatch: pytest.MonkeyPatch, world: World, culprit: int) -> None:
    if world.rank == 0:
        write = os.writev

        def fail(descriptor: int, pieces: Any) -> int:
            if Path(os.readlink(f"/proc/self/fd/{descriptor}")).name == files.data_file_name(culprit):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            return write(descriptor, pieces)

        monkeypatch.setattr(os, "writev", fail)
    world.exchange(None)


@pytest.mark.parametrize("culprit", (0, 1))
@pytest.mark.parametrize("asynchronous", (False, True))
def test_a_rank_that_cannot_write_fails_the_save_on_all(
    asynchronous: bool, culprit: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The previous checkpoint stays the last; an asynchronous save's error is raised by the next call of any kind."""

    def rank(world: World) -> None:
        training = CheckpointTraining(world, "zero3")
        training.steps(0, 1)
        training.save(tmp_path, 1)
        with monkeypatch.context() as patched:
            full_disk(patched, world, culprit)
            says = f"on rank {culprit}: OSError.*No space left"
            if asynchronous:
                training.save(tmp_path, 2, asynchronous=True)
                with pytest.raises(CheckpointError, match=says):
                    training.save(tmp_path, 3) if world.rank else training.load(tmp_path)
            else:
                with pytest.raises(CheckpointError, match=says):
                    training.save(tmp_path, 2)
            world.exchange(None)
        world.exchange(None)
        assert checkpoint.latest(tmp_path) == tmp_path / "step-00000001"
        training.save(tmp_path, 2)
        assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000001", "step-00000002"]

    comm.run_threads(RANKS, rank)


_SILENT = """
import os, sys, pathlib, npuzero
from checkpoint.training import CheckpointTraining
os.writev = lambda descriptor, pieces: 1 / 0
training = CheckpointTraining(npuzero.comm.SingleWorld(), "zero3")
training.save(pathlib.Path(sys.argv[1]), 1, asynchronous=True)
"""


@pytest.mark.world
def test_an_error_that_nobody_asks_for_is_shown_at_the_end(tmp_path: Path) -> None:
    search = os.pathsep.join([str(Path(npuzero.__file__).parents[1]), str(Path(__file__).parents[1])])
    command = [sys.executable, "-c", _SILENT, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, env={"PYTHONPATH": search}, timeout=300)
    assert "CheckpointError: save" in done.stderr and "ZeroDivisionError" in done.stderr


def test_old_ones_go_when_the_new_one_is_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def rank(world: World) -> None:
        training = CheckpointTraining(world, "zero2")
        training.steps(0, 1)
        for step in (1, 2, 3):
            training.save(tmp_path, step, keep_last=2)
        world.exchange(None)
        assert [path.name for path in sorted(tmp_path.iterdir())] == ["step-00000002", "step-00000003"]
        with monkeypatch.context() as patched:
            full_disk(patched, world, 1)
            with pytest.raises(CheckpointError):
                training.save(tmp_path, 4, keep_last=1)
            world.exchange(None)
        world.exchange(None)
        names = [path.name for path in sorted(tmp_path.iterdir())]
        assert names == ["step-00000002", "step-00000003"]
        training.save(tmp_path, 5, keep_last=1)
        assert [path.name for path in tmp_path.iterdir()] == ["step-00000005"]

    comm.run_threads(RANKS, rank)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"step": 1}, "a step that was not saved yet"),
        ({"step": 2, "extra": lambda: None}, "save extra: expected tensors, numbers"),
        ({"step": 2, "data": DataPosition}, "save data: expected tensors"),
    ],
)
def test_what_cannot_be_saved(options: dict[str, Any], says: str, tmp_path: Path) -> None:
    def rank(world: World) -> None:
        training = CheckpointTraining(world, "zero1")
        training.save(tmp_path, 1)
        chosen = dict(options)
        if "data" in chosen:
            position = DataPosition()
            position.state_dict = lambda: threading.Lock  # type: ignore[method-assign,return-value,assignment]
            chosen["data"] = position
        with pytest.raises(CheckpointError, match=says):
            training.save(tmp_path, chosen.pop("step"), **chosen)

    comm.run_threads(RANKS, rank)


def test_ranks_at_different_steps(tmp_path: Path) -> None:
    def rank(world: World) -> None:
        with pytest.raises(CheckpointError, match=r"expected one step; got steps \[5, 6\]"):
            CheckpointTraining(world, "zero1").save(tmp_path, 5 + world.rank)

    comm.run_threads(RANKS, rank)


@pytest.mark.parametrize("options", ({"step": -1}, {"step": True}, {"step": 1, "keep_last": 0}))
def test_bad_numbers(options: dict[str, Any], tmp_path: Path) -> None:
    training = CheckpointTraining(comm.SingleWorld(), "zero1")
    with pytest.raises(ConfigError, match=r"expected (an integer from 0|a positive integer); got"):
        checkpoint.save(tmp_path, training.model, **options)


def test_checkpointer_resumes_where_it_was(tmp_path: Path) -> None:
    def life(world: World, begin: int, end: int) -> dict[str, torch.Tensor]:
        training = CheckpointTraining(world, "zero3", seed=begin)
        kept = {"model": training.model, "optimizer": training.optimizer, "scheduler": training.scheduler}
        with checkpoint.Checkpointer(tmp_path, every=2, keep_last=1, **kept) as checkpoints:
            assert checkpoints.resume() == begin
            for step in range(begin, end):
                training.steps(step, step + 1)
                checkpoints.after(step + 1)
        return tensors_without_losses(training)

    comm.run_threads(RANKS, lambda world: life(world, 0, 5))
    second = comm.run_threads(RANKS, lambda world: life(world, 4, 6))

    def unbroken(world: World) -> dict[str, torch.Tensor]:
        training = CheckpointTraining(world, "zero3")
        training.steps(0, 6)
        return tensors_without_losses(training)

    for found, expected in zip(second, comm.run_threads(RANKS, unbroken), strict=True):
        assert_same_bits(found, expected)


def test_the_last_checkpoint_is_that_of_the_last_step(tmp_path: Path) -> None:
    """Order checkpoints by step, with any number of digits."""
    training = CheckpointTraining(comm.SingleWorld(), "zero1")
    for step in (10**8, 10**8 - 1):
        training.save(tmp_path, step)
    assert training.load(tmp_path).step == 10**8


@pytest.mark.parametrize("ends", ["with the run", "by close()"])
def test_the_end_of_the_ranks_waits_for_a_save_under_way(
    ends: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = CallGate(monkeypatch)

    def rank(world: World) -> None:
        training = CheckpointTraining(world, "zero3")
        training.steps(0, 1)
        training.save(tmp_path, 1, asynchronous=True)
        threading.Timer(0.2, gate.open).start()  # ranks wait for the writers only at their end
        if ends == "by close()":
            world.close()

    comm.run_threads(RANKS, rank)
    assert checkpoint.latest(tmp_path) == tmp_path / "step-00000001"


def test_a_save_that_fails_at_the_end_of_the_ranks_is_raised_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = CallGate(monkeypatch)

    def rank(world: World) -> None:
        training = CheckpointTraining(world, "zero3")
        training.steps(0, 1)
        full_disk(monkeypatch, world, 1)
        training.save(tmp_path, 1, asynchronous=True)
        threading.Timer(0.2, gate.open).start()

    with pytest.raises(CheckpointError, match=r"on rank 1: OSError.*No space left"):
        comm.run_threads(RANKS, rank)
    assert checkpoint.latest(tmp_path) is None
