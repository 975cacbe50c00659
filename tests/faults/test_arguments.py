"""Invalid arguments, one after another, to many public calls: each ends in a typed error."""

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


def two_linears() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))


def single_world() -> comm.World:
    return comm.SingleWorld()


def single_rank_mesh() -> npuzero.Mesh:
    return npuzero.mesh(world=single_world())


def net_after_backward() -> nn.Module:
    model = npuzero.zero(two_linears(), world=single_world())
    model(torch.ones(2, 4)).sum().backward()
    return model


def call_pipeline(**options: Any) -> object:
    return npuzero.pipeline(
        two_linears(), single_rank_mesh(), **{"micro_batches": 1, "loss_fn": nn.functional.mse_loss, **options}
    )


def call_predict(**options: Any) -> object:
    return npuzero.predict(**{"model": two_linears(), "plan": "zero3", "world": 4, **options})


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
    "clip_grad_norm_": (NUMBERS, lambda value: npuzero.clip_grad_norm_(net_after_backward(), value)),
    "clip_grad_norm_: norm_type": (NUMBERS, lambda value: npuzero.clip_grad_norm_(net_after_backward(), 1.0, value)),
    "clip_grad_value_": (NUMBERS, lambda value: npuzero.clip_grad_value_(net_after_backward(), value)),
    "grad_norms": (NUMBERS, lambda value: npuzero.grad_norms(net_after_backward(), value)),
    "stage": (COUNTS, lambda value: npuzero.zero(two_linears(), value, world=single_world())),
    "mesh: data": (COUNTS, lambda value: npuzero.mesh(world=single_world(), data=value)),
    "mesh: world": ((1, "x", torch.ones(2)), lambda value: npuzero.mesh(world=value)),
    "MeshShape": ((*COUNTS, 0, None), lambda value: npuzero.MeshShape(value, 1)),
    "pipeline: micro_batches": ((*COUNTS, 10**12), lambda value: call_pipeline(micro_batches=value)),
    "pipeline: chunks": (COUNTS, lambda value: call_pipeline(chunks=value)),
    "pipeline: schedule": (COUNTS, lambda value: call_pipeline(schedule=value)),
    "pipeline: blocks": ((True, {}, torch.tensor(2), "0"), lambda value: call_pipeline(blocks=value)),
    "pipeline: split": ((True, {}, torch.tensor(2), "0"), lambda value: call_pipeline(split=value)),
    "pipeline: settings": ((True, {}), lambda value: call_pipeline(settings=value)),
    "predict: micro_batches": (COUNTS, lambda value: call_predict(micro_batches=value)),
    "predict: moments": (COUNTS, lambda value: call_predict(moments=value)),
    "predict: clip": (FLAGS, lambda value: call_predict(clip=value)),
    "predict: parts": ((5, [5], [["0"], None], "ab", torch.ones(2)), lambda value: call_predict(parts=value)),
    "predict: acts": ((True, "1", [1], torch.ones(2)), lambda value: call_predict(acts=value)),
    "parallel.tensor: mesh": ((None, 1), lambda value: parallel.tensor(two_linears(), value)),
    "ClassHead: mesh": ((None, 1), lambda value: parallel.ClassHead(4, 4, value)),
    "AdamW: moments": ((1, [1], torch.ones(2)), lambda value: npuzero.AdamW(two_linears().parameters(), moments=value)),
    "weights": (
        PATHS[:-1][:3] + PATHS[4:],
        lambda value: npuzero.zero(two_linears(), world=single_world(), weights=value),
    ),
    "export: path": (PATHS, lambda value: npuzero.export(net_after_backward(), value)),
    "export: rename": (
        (True, "x", 1, {}),
        lambda value: npuzero.export(net_after_backward(), "exported", rename=value),
    ),
    "export: file_bytes": (COUNTS, lambda value: npuzero.export(net_after_backward(), "exported", file_bytes=value)),
    "save: folder": (PATHS, lambda value: checkpoint.save(value, net_after_backward(), step=1)),
    "save: asynchronous": (
        FLAGS,
        lambda value: checkpoint.save("run", net_after_backward(), step=1, asynchronous=value),
    ),
    "save: step": (COUNTS, lambda value: checkpoint.save("run", net_after_backward(), step=value)),
    "load": (PATHS, lambda value: checkpoint.load(value, net_after_backward())),
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
            model=two_linears(), config={"train_batch_size": 1, "gradient_clipping": value}, world=single_world()
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


def make_fifo(folder: Path) -> Path:
    os.mkfifo(folder / "pipe.json")
    return folder / "pipe.json"


def write_nested_json(folder: Path) -> Path:
    (folder / "nested.json").write_text("[" * 100_000)
    return folder / "nested.json"


#: Files that a reader must neither wait for nor read without end.
FILES: dict[str, Callable[[Path], Path]] = {
    "a pipe": make_fifo,
    "a device": lambda _: Path("/dev/zero"),
    "a folder": lambda folder: folder,
    "nested": write_nested_json,
}
READERS: dict[str, Callable[[Path], object]] = {
    "weights": lambda path: npuzero.zero(two_linears(), world=single_world(), weights=path),
    "a configuration": lambda path: npuzero.initialize(model=two_linears(), config=str(path), world=single_world()),
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
    npuzero.clip_grad_norm_(net_after_backward(), numpy.float32(1.0))
    npuzero.clip_grad_norm_(net_after_backward(), torch.tensor(1.0))
