"""Saves that overlap training, with optimizer states on a disk: a save keeps the state at the call on that disk."""

from __future__ import annotations

import errno
import gc
import os
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from npuzero import Plan, Settings, checkpoint, comm
from npuzero.comm import World
from npuzero.errors import NpuZeroError, OutOfSpace, StorageError
from npuzero.memory.file import FileStore
from npuzero.shard.find_engine import engine_of
from npuzero.shard.offload.nvme_extents import FileExtents
from world.test_optimizers import optimizer_state
from world.test_tiers import NVME, PRECISIONS, folders, placed_plan
from world.toy import build_seeded_model
from world.train import CutSession, State, assert_same_bits

from .test_saving import CallGate

__all__ = ["folders"]  # a fixture

#: Bytes of a chunk: small, so that each flat parameter's shard has many chunks.
SETTINGS = Settings(chunk_bytes=3000)


class BackgroundSaveRun:
    """Hold a model on one rank; the row gives the placement of its states."""

    def __init__(self, world: World, row: Plan, seed: int = 0) -> None:
        self.session = CutSession(build_seeded_model(seed), world, plan=row, settings=SETTINGS)
        self.model = self.session.model
        self.optimizer = self.session.optimizer(torch.optim.AdamW, lr=1e-2)

    def steps(self, begin: int, end: int) -> BackgroundSaveRun:
        for step in range(begin, end):
            self.session.loss(step).backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
        return self

    def save(self, folder: Path, step: int, **options: Any) -> checkpoint.Saving:
        return checkpoint.save(folder, self.model, self.optimizer, step=step, **options)

    def state(self) -> State:
        return optimizer_state(self.optimizer) | self.session.state()

    @property
    def second(self) -> int:
        """Return the bytes that copies kept for a save take on the disk; the update's lane frees them."""
        engine_of(self.model).far.stream.quiet()
        return engine_of(self.model).spaces[NVME].held["buffers"]


def gate_of_reads(monkeypatch: pytest.MonkeyPatch, free: int = 0) -> CallGate:
    """Delay a save in its reads of the disk: once it writes, it has read all of so small a shard."""
    return CallGate(monkeypatch, FileExtents, "read_kept", free)


def placed_on_disk(precision: str, ranks: int, **where: Any) -> Plan:
    return placed_plan("zero3", PRECISIONS[precision], ranks, memory=NVME, **where)


@pytest.mark.parametrize(
    ("precision", "ranks", "where"),
    [
        ("bf16", 1, {}),
        ("split", 2, {"parameters": NVME}),
        pytest.param("8 bits", 2, {"share": 0.6}, marks=pytest.mark.slow),
        pytest.param("split", 2, {}, marks=pytest.mark.slow),
        pytest.param("drawn", 3, {}, marks=pytest.mark.slow),
        pytest.param("fp32", 2, {"share": 0.3}, marks=pytest.mark.slow),
    ],
)
def test_what_is_saved_is_the_state_at_the_call(
    precision: str, ranks: int, where: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Training may overwrite any part before the save has read it; training has the bits of a run without a save."""
    gate = gate_of_reads(monkeypatch, free=2)
    row = placed_on_disk(precision, ranks, **where)

    def rank(world: World) -> tuple[State, State]:
        run = BackgroundSaveRun(world, row).steps(0, 2)
        for step in (2, 5):  # the second save finds some chunks at their second place
            save = run.save(tmp_path / "run", step, asynchronous=True)
            assert run.second > 0
            run.steps(step, step + 3)
            assert not save.done()
            world.exchange(None)
            gate.open()
            save.wait()
            world.exchange(None)
            gate.close()
        gate.open()
        run.steps(8, 9)
        assert run.steps(9, 10).second == 0, "all is back in its first place"
        states = [run.state()]
        for step in (2, 5):
            fresh = BackgroundSaveRun(
                world, Plan.preset("zero3", precision=PRECISIONS[precision], local_size=1), seed=1
            )
            checkpoint.load(tmp_path / "run" / f"step-{step:08}", fresh.model, fresh.optimizer)
            states.append(fresh.state())
        return tuple(states)

    def unbroken(world: World) -> tuple[State, State]:
        run = BackgroundSaveRun(world, row).steps(0, 2)
        second = run.state()
        fifth = run.steps(2, 5).state()
        return run.steps(5, 10).state(), second, fifth

    found = comm.run_threads(ranks, rank)
    for mine, expected in zip(found, comm.run_threads(ranks, unbroken), strict=True):
        for one, other in zip(mine, expected, strict=True):
            assert_same_bits(one, other)


def test_a_disk_without_room_for_a_second_place_is_told_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def rank(world: World) -> None:
        run = BackgroundSaveRun(world, placed_on_disk("bf16", 2)).steps(0, 1)
        world.exchange(None)  # the disk is full for all ranks, which are threads
        with monkeypatch.context() as patched:
            if world.rank == 0:
                full = os.statvfs_result((4096, 4096, 9, 1, 1, 9, 9, 9, 0, 255))
                patched.setattr(os, "statvfs", lambda path: full)
            world.exchange(None)
            with pytest.raises(OutOfSpace, match="expected room for"):
                run.save(tmp_path / "run", 1, asynchronous=True)
        world.exchange(None)
        assert not list((tmp_path / "run").glob("*"))
        run.steps(1, 2).save(tmp_path / "run", 2, asynchronous=True).wait()
        assert checkpoint.latest(tmp_path / "run") == tmp_path / "run" / "step-00000002"

    comm.run_threads(2, rank)


def test_a_disk_that_fails_while_a_save_reads_it_is_told_and_training_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = CallGate(monkeypatch)
    read = FileStore.read

    def fail(store: FileStore, offset: int, buffer: torch.Tensor) -> Any:
        if threading.current_thread().name.startswith("save "):
            raise StorageError("read in a folder", expected="success", got=os.strerror(errno.EIO), do="Look at it.")
        return read(store, offset, buffer)

    def rank(world: World) -> None:
        run = BackgroundSaveRun(world, placed_on_disk("bf16", 1)).steps(0, 1)
        with monkeypatch.context() as patched:
            patched.setattr(FileStore, "read", fail)
            gate.open()
            save = run.save(tmp_path / "run", 1, asynchronous=True)
            run.steps(1, 3)
            with pytest.raises(StorageError, match="read in a folder"):
                save.wait()
        assert run.steps(3, 4).steps(4, 5).second == 0, "nothing is kept for a save that has failed"
        assert not list((tmp_path / "run").glob("step-*"))
        with pytest.raises(NpuZeroError, match="read in a folder"):
            run.save(tmp_path / "run", 5)
        run.save(tmp_path / "run", 5)

    comm.run_threads(1, rank)


def test_a_model_may_go_while_it_is_saved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gate = gate_of_reads(monkeypatch)

    def rank(world: World) -> None:
        run = BackgroundSaveRun(world, placed_on_disk("8 bits", 1)).steps(0, 1)
        expected = run.state()
        save = run.save(tmp_path / "run", 1, asynchronous=True)
        run.steps(1, 2)
        del run
        gc.collect()
        gate.open()
        save.wait()
        fresh = BackgroundSaveRun(world, placed_on_disk("8 bits", 1), seed=1)
        checkpoint.load(tmp_path / "run", fresh.model, fresh.optimizer)
        assert_same_bits(fresh.state(), expected)

    comm.run_threads(1, rank)


def test_what_the_program_writes_during_a_save_is_not_saved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Load into the model and the optimizer, outside of any update."""
    gate = gate_of_reads(monkeypatch)

    def rank(world: World) -> None:
        run, other = (BackgroundSaveRun(world, placed_on_disk("8 bits", 2), seed=seed).steps(0, 1) for seed in (0, 1))
        expected, others = run.state(), other.session.state()
        stored = other.optimizer.state_dict()
        save = run.save(tmp_path / "run", 1, asynchronous=True)
        run.session.load(others)
        run.optimizer.load_state_dict(stored)
        assert_same_bits(run.state(), other.state())
        world.exchange(None)
        gate.open()
        save.wait()
        checkpoint.load(tmp_path / "run", run.model, run.optimizer)
        assert_same_bits(run.state(), expected)

    comm.run_threads(2, rank)
