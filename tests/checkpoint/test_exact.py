"""Silent errors of saving or loading: values of another group, rank or step, or in another order."""

from __future__ import annotations

import os
import zlib
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn

import npuzero
from npuzero import checkpoint, comm
from npuzero.checkpoint import loading, rng, source
from npuzero.checkpoint.formats import item_files as files
from npuzero.comm import World
from world.train import State, assert_same_bits

from .training import CheckpointTraining, checkpoint_loss, global_batch_tokens

RANKS = 2


# -- training on after a load, bit by bit ------------------------------------------------------------------------------


@pytest.mark.parametrize(("plan", "precision"), [("zero1", None), ("zero3", "bf16"), ("hsdp", "bf16-split")])
def test_training_goes_on_after_torchs_own_load(plan: str, precision: Any) -> None:
    """Load by ``checkpoint.load_state_dict`` after dcp.load: parameters follow their masters on every rank."""

    def rank(world: World) -> None:
        first, second = (CheckpointTraining(world, plan, seed=seed, precision=precision) for seed in (0, 1))
        first.steps(0, 2)
        second.steps(7, 8)
        filled = checkpoint.state_dict(first.model, first.optimizer)
        checkpoint.load_state_dict(second.model, second.optimizer, state=filled)
        second.scheduler.load_state_dict(first.scheduler.state_dict())
        for training in (first, second):
            training.losses.clear()
            training.steps(2, 4)
        assert_same_bits(second.state(), first.state())

    comm.run_threads(RANKS, rank)


@pytest.mark.parametrize(("plan", "precision"), [("zero0", "bf16-split"), ("zero1", "bf16")])
def test_what_a_program_has_just_written_is_saved_and_does_not_outlast_a_load(
    plan: str, precision: str, tmp_path: Path
) -> None:
    """Load into unsharded bfloat16 parameters with masters, before any step."""

    def halve(training: CheckpointTraining, every: int = 1) -> None:
        with torch.no_grad():
            for parameter in list(training.model.parameters())[::every]:
                parameter.mul_(0.5)

    def rank(world: World) -> None:
        first, second, third = (CheckpointTraining(world, plan, seed=seed, precision=precision) for seed in (0, 1, 1))
        first.steps(0, 1)
        halve(first)
        first.steps(1, 2)  # so that there are lower halves again
        halve(first, every=2)
        first.save(tmp_path, 2)
        second.load(tmp_path)
        third.steps(0, 1)
        halve(third)
        third.load(tmp_path)
        for training in (first, second, third):
            training.losses.clear()
            training.steps(2, 3)
        for training in (second, third):
            assert_same_bits(training.state(), first.state())

    comm.run_threads(RANKS, rank)


def test_steps_that_the_device_counts_are_those_of_the_checkpoint(tmp_path: Path) -> None:
    """Load under a loss scaler, into a model that has counted its own steps before."""

    def steps(training: CheckpointTraining, scaler: npuzero.LossScaler, begin: int, end: int) -> None:
        for step in range(begin, end):
            scaler.scale(
                checkpoint_loss(training.model, global_batch_tokens(step).chunk(RANKS)[training.world.rank])
            ).backward()
            scaler.step(training.optimizer)
            scaler.update()
            training.optimizer.zero_grad()

    def rank(world: World) -> None:
        first, second = (CheckpointTraining(world, "zero3", precision="fp16", seed=seed) for seed in (0, 1))
        scaler, other = npuzero.LossScaler(init_scale=64.0), npuzero.LossScaler(init_scale=64.0)
        steps(first, scaler, 0, 2)
        first.save(tmp_path, 2, scaler=scaler)
        steps(second, other, 0, 5)
        second.load(tmp_path, scaler=other)
        taken = [values["step"] for values in second.optimizer.state_dict()["state"].values()]
        assert set(map(float, taken)) == {2.0}
        steps(first, scaler, 2, 4)
        steps(second, other, 2, 4)
        assert_same_bits(second.state(), first.state())

    comm.run_threads(RANKS, rank)


def test_split_masters_keep_their_lower_halves(tmp_path: Path) -> None:
    """A split master trains as a float32 master does: their checkpoints hold the same bits, to the end."""

    def train(world: World, precision: str) -> None:
        training = CheckpointTraining(world, "zero3", precision=precision)
        training.steps(0, 2)
        training.save(tmp_path / precision, 2)

    def go_on(world: World) -> None:
        found = []
        for precision in ("bf16", "bf16-split"):
            training = CheckpointTraining(world, "zero2", precision=precision, seed=1)
            training.load(tmp_path / precision)
            training.steps(2, 3)
            path = training.save(tmp_path / precision, 3).wait()
            found.append(saved_weights(path))
        assert_same_bits(found[1], found[0])

    for precision in ("bf16", "bf16-split"):
        comm.run_threads(RANKS, partial(train, precision=precision))
    whole, split = (saved_weights(tmp_path / precision / "step-00000002") for precision in ("bf16", "bf16-split"))
    assert_same_bits(split, whole)
    assert any((value.bfloat16().float() != value).any() for value in split.values()), "nothing was in the lower halves"
    comm.run_threads(RANKS, go_on)


def saved_weights(path: Path) -> State:
    opened = source.CheckpointReader(path)
    return {key: opened.read_object(key) for key in opened.tensors if key.startswith("model.")}


# -- whose is what -----------------------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore::UserWarning:torch.*")
def test_equally_long_groups_of_plain_torch_keep_their_own_states(tmp_path: Path) -> None:
    """Groups have numbered parameters, as in ``optimizer.state_dict()``, so that their lengths do not identify them."""

    def build() -> nn.Module:
        return nn.Sequential(*(nn.Linear(4, 4) for _ in range(3)))

    def groups(model: nn.Module) -> list[dict[str, Any]]:
        return [{"params": list(layer.parameters()), "lr": 0.1 * (i + 1)} for i, layer in enumerate(model.children())]

    plain = build()
    optimizer = torch.optim.AdamW(groups(plain))
    for _ in range(2):
        (plain(torch.ones(2, 4)) * torch.arange(4)).sum().backward()
        optimizer.step()
    expected = optimizer.state_dict()
    dcp.save({"model": plain.state_dict(), "optimizer": expected}, checkpoint_id=tmp_path, no_dist=True)

    def load(world: World) -> dict[str, Any]:
        model: Any = npuzero.zero(build(), plan="zero3", world=world)
        ours = npuzero.AdamW(groups(model), lr=1.0)
        checkpoint.load(tmp_path, model, ours)
        return ours.state_dict()

    for found in comm.run_threads(RANKS, load):
        assert [group["lr"] for group in found["param_groups"]] == [0.1, 0.2, 0.1 * 3]
        for number, values in expected["state"].items():
            assert_same_bits(found["state"][number], values)


def test_every_rank_has_random_numbers_of_its_own_whoever_saved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two ranks saved and five resume: two draw the saved ranks' next numbers, and three draw distinct ones."""
    device = torch.device("cpu")
    states, expected = [], []
    for seed in (11, 12):
        torch.manual_seed(seed)
        states.append(rng.capture_rng_state(device))
        expected.append(torch.rand(4).tolist())
    # Ranks that are threads share their generators: each rank returns a different state.
    monkeypatch.setattr(rng, "capture_rng_state", lambda device: states[comm.current_world().rank])
    path = comm.run_threads(RANKS, lambda world: CheckpointTraining(world, "zero1").save(tmp_path, 1).wait())[0]
    opened = source.CheckpointReader(path)

    def drawn(rank: int) -> list[float]:
        loading.restore_rng(opened, rank, 5, device)
        return torch.rand(4).tolist()

    found = [drawn(rank) for rank in range(5)]
    assert found[:2] == expected
    assert len({tuple(numbers) for numbers in found}) == 5
    assert found == [drawn(rank) for rank in range(5)], "and the same at every attempt"


# -- on the disk -------------------------------------------------------------------------------------------------------


def test_the_manifest_says_what_the_files_are(tmp_path: Path) -> None:
    """The length and checksum of every file match an independent computation."""

    def rank(world: World) -> None:
        training = CheckpointTraining(world, "zero3")
        training.steps(0, 1)
        training.save(tmp_path, 1)

    comm.run_threads(3, rank)
    path = tmp_path / "step-00000001"
    listed = files.Manifest(path).files
    assert listed.keys() == {file.name for file in path.iterdir()} - {files.MANIFEST}
    for name, facts in listed.items():
        raw = (path / name).read_bytes()
        assert (facts.nbytes, facts.crc) == (len(raw), zlib.crc32(raw)), name


class SystemCalls:
    """Record the system calls in order: (verb, path)."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.made: list[tuple[str, str]] = []
        for verb in ("fsync", "writev"):
            self._record(monkeypatch, verb, lambda descriptor: os.readlink(f"/proc/self/fd/{descriptor}"))
        self._record(monkeypatch, "rename", str)
        self._record(monkeypatch, "rmdir", str)

    def _record(self, monkeypatch: pytest.MonkeyPatch, verb: str, path_of: Any) -> None:
        call = getattr(os, verb)

        def recorded(first: Any, *rest: Any, **options: Any) -> Any:
            self.made.append((verb, path_of(first)))
            return call(first, *rest, **options)

        monkeypatch.setattr(os, verb, recorded)

    def last(self, verb: str, path: Path) -> int:
        return max(i for i, made in enumerate(self.made) if made == (verb, str(path)))


def test_a_checkpoint_is_durable_before_it_has_its_name_and_before_an_older_one_goes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sync the files, their folder's names, the rename and the run folder's name, and only then remove old ones."""
    run = tmp_path / "new" / "run"
    training = CheckpointTraining(comm.SingleWorld(), "zero3")
    calls = SystemCalls(monkeypatch)
    training.save(run, 1)
    for folder in (tmp_path, tmp_path / "new"):
        assert ("fsync", str(folder)) in calls.made, "a new folder's own name"
    calls.made.clear()
    path = training.save(run, 2, keep_last=1).wait()
    (place,) = {Path(name).parent for verb, name in calls.made if verb == "writev"}
    durable = [calls.last("fsync", place / file.name) for file in path.iterdir()]
    data = place / files.data_file_name(0)
    named = calls.last("rename", place)
    assert calls.last("writev", data) < calls.last("fsync", data)
    assert max(durable) < calls.last("fsync", place) < named < calls.last("fsync", run)
    assert calls.last("fsync", run) < calls.last("rename", run / "step-00000001")


@pytest.mark.parametrize("most", (1, 700))
def test_a_kernel_that_takes_a_part_of_what_is_written(
    most: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Short writes occur if the disk is nearly full, or a write is larger than 2 GiB."""
    written: Any = os.writev
    model: Any = npuzero.zero(nn.Linear(3, 3), plan="zero3", world=comm.SingleWorld())

    def short(descriptor: int, pieces: Any) -> int:
        return int(written(descriptor, [memoryview(pieces[0])[:most]]))

    monkeypatch.setattr(os, "writev", short)
    path = checkpoint.save(tmp_path, model, step=1, extra="x" * 1000).wait()
    monkeypatch.undo()
    checkpoint.verify(path)
    other: Any = npuzero.zero(nn.Linear(3, 3), plan="zero3", world=comm.SingleWorld())
    assert checkpoint.load(path, other).extra == "x" * 1000
    assert_same_bits(npuzero.full_state_dict(other), npuzero.full_state_dict(model))
