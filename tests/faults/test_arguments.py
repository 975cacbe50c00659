"""Arguments that no call can take, one after another, for many public calls: each ends in a typed error."""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import npuzero
from npuzero import checkpoint, comm, parallel
from npuzero.errors import NpuZeroError

HUGE = 10**400
NUMBERS = (math.nan, HUGE, -HUGE, "1", b"1", 1j, [1], {}, object(), torch.tensor([1.0, 2.0]))
COUNTS = (*NUMBERS, True, -1, 0.5, math.inf)
FLAGS = (np.array([True, False]), torch.ones(2), torch.empty((), device="meta"), "yes", None, 2, [1], object())
PATHS = ("x\0y", "\ud800", "x" * 5000, None, 1, b"x", [1], object())


def net() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))


def world() -> comm.World:
    return comm.SingleWorld()


def mesh() -> npuzero.Mesh:
    return npuzero.mesh(world=world())


def trained() -> nn.Module:
    model = npuzero.zero(net(), world=world())
    model(torch.ones(2, 4)).sum().backward()
    return model


def pipeline(**options: Any) -> object:
    return npuzero.pipeline(net(), mesh(), **{"micro_batches": 1, "loss_fn": nn.functional.mse_loss, **options})


def predict(**options: Any) -> object:
    return npuzero.predict(**{"model": net(), "plan": "zero3", "world": 4, **options})


CALLS: dict[str, tuple[tuple[Any, ...], Callable[[Any], object]]] = {
    **{
        f"LossScaler: {name}": (NUMBERS, lambda value, name=name: npuzero.LossScaler(**{name: value}))
        for name in ("init_scale", "growth_factor", "backoff_factor", "floor", "ceiling")
    },
    **{
        f"LossScaler: {name}": (COUNTS, lambda value, name=name: npuzero.LossScaler(**{name: value}))
        for name in ("growth_interval", "hysteresis", "growth_delay")
    },
    "LossScaler: enabled": (FLAGS, lambda value: npuzero.LossScaler(enabled=value)),
    "LossScaler: consecutive_hysteresis": (FLAGS, lambda value: npuzero.LossScaler(consecutive_hysteresis=value)),
    "clip_grad_norm_": (NUMBERS, lambda value: npuzero.clip_grad_norm_(trained(), value)),
    "clip_grad_norm_: norm_type": (NUMBERS, lambda value: npuzero.clip_grad_norm_(trained(), 1.0, value)),
    "clip_grad_value_": (NUMBERS, lambda value: npuzero.clip_grad_value_(trained(), value)),
    "grad_norms": (NUMBERS, lambda value: npuzero.grad_norms(trained(), value)),
    "stage": (COUNTS, lambda value: npuzero.zero(net(), value, world=world())),
    "mesh: data": (COUNTS, lambda value: npuzero.mesh(world=world(), data=value)),
    "mesh: world": ((1, "x", torch.ones(2)), lambda value: npuzero.mesh(world=value)),
    "MeshShape": ((*COUNTS, 0, None), lambda value: npuzero.MeshShape(value, 1)),
    "pipeline: micro_batches": ((*COUNTS, 10**12), lambda value: pipeline(micro_batches=value)),
    "pipeline: chunks": (COUNTS, lambda value: pipeline(chunks=value)),
    "pipeline: schedule": (COUNTS, lambda value: pipeline(schedule=value)),
    "pipeline: blocks": ((True, {}, torch.tensor(2), "0"), lambda value: pipeline(blocks=value)),
    "pipeline: split": ((True, {}, torch.tensor(2), "0"), lambda value: pipeline(split=value)),
    "pipeline: settings": ((True, {}), lambda value: pipeline(settings=value)),
    "predict: micro_batches": (COUNTS, lambda value: predict(micro_batches=value)),
    "predict: moments": (COUNTS, lambda value: predict(moments=value)),
    "predict: clip": (FLAGS, lambda value: predict(clip=value)),
    "predict: parts": ((5, [5], [["0"], None], "ab", torch.ones(2)), lambda value: predict(parts=value)),
    "predict: acts": ((True, "1", [1], torch.ones(2)), lambda value: predict(acts=value)),
    "parallel.tensor: mesh": ((None, 1), lambda value: parallel.tensor(net(), value)),
    "ClassHead: mesh": ((None, 1), lambda value: parallel.ClassHead(4, 4, value)),
    "AdamW: moments": ((1, [1], torch.ones(2)), lambda value: npuzero.AdamW(net().parameters(), moments=value)),
    "weights": (PATHS[:-1][:3] + PATHS[4:], lambda value: npuzero.zero(net(), world=world(), weights=value)),
    "export: path": (PATHS, lambda value: npuzero.export(trained(), value)),
    "export: rename": ((True, "x", 1, {}), lambda value: npuzero.export(trained(), "exported", rename=value)),
    "export: file_bytes": (COUNTS, lambda value: npuzero.export(trained(), "exported", file_bytes=value)),
    "save: folder": (PATHS, lambda value: checkpoint.save(value, trained(), step=1)),
    "save: asynchronous": (FLAGS, lambda value: checkpoint.save("run", trained(), step=1, asynchronous=value)),
    "save: step": (COUNTS, lambda value: checkpoint.save("run", trained(), step=value)),
    "load": (PATHS, lambda value: checkpoint.load(value, trained())),
    "latest": (PATHS, checkpoint.latest),
    "verify": (PATHS, checkpoint.verify),
    "Checkpointer: folder": (PATHS[:2] + PATHS[3:], lambda value: checkpoint.Checkpointer(value, every=1)),
    "Checkpointer: asynchronous": (
        FLAGS,
        lambda value: checkpoint.Checkpointer("run", every=1, asynchronous=value),
    ),
    "configuration of DeepSpeed": (
        (HUGE, math.inf),
        lambda value: npuzero.initialize(
            model=net(), config={"train_batch_size": 1, "gradient_clipping": value}, world=world()
        ),
    ),
}


@pytest.mark.parametrize("name", CALLS)
def test_an_argument_that_no_call_can_take(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    values, call = CALLS[name]
    for value in values:
        with pytest.raises(NpuZeroError):
            call(value)


@pytest.mark.parametrize("value", [True, 1, np.True_, torch.tensor(True)])
def test_flags_of_each_library_are_taken(value: Any) -> None:
    assert npuzero.LossScaler(enabled=value).is_enabled() is True


def pipe_of(folder: Path) -> Path:
    os.mkfifo(folder / "pipe.json")
    return folder / "pipe.json"


def nested(folder: Path) -> Path:
    (folder / "nested.json").write_text("[" * 100_000)
    return folder / "nested.json"


#: Files that no reader may wait for, or read without an end.
FILES: dict[str, Callable[[Path], Path]] = {
    "a pipe": pipe_of,
    "a device": lambda _: Path("/dev/zero"),
    "a folder": lambda folder: folder,
    "nested": nested,
}
READERS: dict[str, Callable[[Path], object]] = {
    "weights": lambda path: npuzero.zero(net(), world=world(), weights=path),
    "a configuration": lambda path: npuzero.initialize(model=net(), config=str(path), world=world()),
    "a model to advise on": lambda path: npuzero.advise(str(path), "8xa100-80g"),
    "a cluster": lambda path: npuzero.planner.Cluster.load(path),
}


@pytest.mark.parametrize("file", FILES)
@pytest.mark.parametrize("reader", READERS)
def test_a_file_that_is_none_to_read(reader: str, file: str, tmp_path: Path) -> None:
    with pytest.raises(NpuZeroError):
        READERS[reader](FILES[file](tmp_path))


def test_numbers_of_numpy_and_tensors_are_numbers() -> None:
    numpy = pytest.importorskip("numpy")
    npuzero.LossScaler(init_scale=numpy.float64(8.0), growth_interval=numpy.int64(3), hysteresis=2.0)
    npuzero.clip_grad_norm_(trained(), numpy.float32(1.0))
    npuzero.clip_grad_norm_(trained(), torch.tensor(1.0))
