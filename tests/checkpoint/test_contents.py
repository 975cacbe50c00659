"""Contents of a checkpoint other than weights and Adam's states; contents that do not fit; malicious contents."""

from __future__ import annotations

import json
import os
import pickle
import random
import zlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import npuzero
from npuzero import checkpoint, comm
from npuzero.checkpoint.formats import item_files as files
from npuzero.comm import World
from npuzero.errors import CheckpointError, ConfigError, StateError
from npuzero.shard.find_engine import engine_of
from world.toy import build_seeded_model
from world.train import State, assert_same_bits

from .training import CheckpointTraining, DataPosition, checkpoint_loss, global_batch_tokens


def state_without_losses(training: CheckpointTraining) -> State:
    return {name: value for name, value in training.state().items() if name != "losses"}


# -- precision ---------------------------------------------------------------------------------------------------------


#: The second run stores the first run's values exactly: float32 masters, or the first's format.
KEPT = [
    *(("bf16", None), (None, "bf16"), ("bf16", "fp16"), ("fp16", "bf16")),
    *(
        ("bf16", "bf16-split"),
        ("bf16-split", None),
        ("bf16-stochastic", "bf16"),
        ("bf16-stochastic", "bf16-stochastic"),
    ),
    *(("bf16-8bit", "bf16"), ("bf16-8bit", "bf16-8bit")),
]


@pytest.mark.parametrize(("saved", "loaded"), KEPT)
def test_masters_keep_their_bits_whatever_the_precision(saved: Any, loaded: Any, tmp_path: Path) -> None:
    def write(world: World) -> dict[str, Any]:
        training = CheckpointTraining(world, "zero3", precision=saved)
        training.steps(0, 2)
        training.save(tmp_path, 2)
        return training.optimizer.state_dict()

    def read(world: World) -> tuple[dict[str, Any], int]:
        training = CheckpointTraining(world, "zero1", precision=loaded, seed=1)
        training.load(tmp_path)
        differ = 0
        source = checkpoint.source.CheckpointReader(checkpoint.latest(tmp_path))
        for flat in engine_of(training.model).flats():
            for i, slot in enumerate(flat.layout.slots):
                whole = source.read_object(f"model.{slot.name}")
                assert whole.dtype == torch.float32
                own = flat.own_slots[i]
                differ += int((flat.read_master(own) != flat.cut_like_own(i, whole)).sum())
                low = flat.cut_like_own(i, whole).to(flat.dtype)
                assert (low.float() - flat.own_parameters[own].float()).abs().max() <= 2**-8 if low.numel() else True
        state = training.optimizer.state_dict()
        training.steps(2, 3)
        return state, differ

    expected = comm.run_threads(2, write)[0]
    for state, differ in comm.run_threads(3, read):
        assert differ == 0
        for number, values in expected["state"].items():
            assert_same_bits(state["state"][number], values)


def test_a_loss_scale_goes_on(tmp_path: Path) -> None:
    """Its window is saved, and the count of skipped steps that only the device knows."""

    def steps(training: CheckpointTraining, scaler: npuzero.LossScaler, begin: int, end: int) -> dict[str, Any]:
        for step in range(begin, end):
            scaler.scale(
                checkpoint_loss(training.model, global_batch_tokens(step).chunk(2)[training.world.rank])
            ).backward()
            scaler.step(training.optimizer)
            scaler.update()
            training.optimizer.zero_grad()
        return state_without_losses(training) | {k: torch.tensor(float(v)) for k, v in scaler.state_dict().items()}

    def rank(world: World) -> None:
        first, second = (CheckpointTraining(world, "zero3", precision="fp16", seed=seed) for seed in (0, 1))
        scaler, other = npuzero.LossScaler(init_scale=2.0**30, growth_interval=3), npuzero.LossScaler()
        steps(first, scaler, 0, 20)
        assert 0 < next(iter(first.optimizer.state_dict()["state"].values()))["step"] < 20
        first.save(tmp_path, 20, scaler=scaler)
        second.load(tmp_path, scaler=other)
        assert_same_bits(steps(second, other, 20, 25), steps(first, scaler, 20, 25))

    comm.run_threads(2, rank)


# -- optimizers --------------------------------------------------------------------------------------------------------

OTHERS = {
    "momentum": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}),
    "RMSprop": (torch.optim.RMSprop, {"lr": 1e-3, "centered": True}),
    "Adagrad": (torch.optim.Adagrad, {"lr": 1e-2}),
    "amsgrad": (npuzero.AdamW, {"lr": 1e-2, "amsgrad": True}),
    "plain SGD": (torch.optim.SGD, {"lr": 0.1}),
}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in ("momentum", "amsgrad") else pytest.mark.slow) for name in OTHERS]
)
def test_any_elementwise_optimizer(name: str, tmp_path: Path) -> None:
    kind, options = OTHERS[name]

    def make(world: World, plan: str, seed: int = 0) -> CheckpointTraining:
        training = CheckpointTraining(world, plan, seed=seed)
        own = issubclass(kind, npuzero.ZeroOptimizer)
        groups = training.groups()
        training.optimizer = kind(groups, **options) if own else npuzero.ZeroOptimizer(kind, groups, **options)
        training.scheduler = torch.optim.lr_scheduler.ConstantLR(training.optimizer)
        return training

    def write(world: World) -> State:
        training = make(world, "zero3")
        training.steps(0, 2)
        training.save(tmp_path, 2)
        training.steps(2, 3)
        return state_without_losses(training)

    def read(world: World) -> State:
        training = make(world, "zero1", seed=1)
        training.steps(0, 1)
        training.load(tmp_path)
        training.steps(2, 3)
        return state_without_losses(training)

    expected = comm.run_threads(2, write)[0]
    for found in comm.run_threads(2, read):
        assert_same_bits(found, expected)


class FrozenBaseAdapter(nn.Module):
    """Build a frozen bfloat16 layer of odd size next to trainable float32 layers."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(3, 3, dtype=torch.bfloat16).requires_grad_(False)
        self.extra = nn.Linear(3, 5)


@pytest.mark.parametrize("asynchronous", (False, True))
def test_frozen_parameters_of_another_dtype(asynchronous: bool, tmp_path: Path) -> None:
    def rank(world: World) -> None:
        first, second = (
            npuzero.zero(build_seeded_model(seed, FrozenBaseAdapter), plan="zero3", world=world) for seed in (0, 1)
        )
        save = checkpoint.save(tmp_path, first, npuzero.AdamW(first.parameters()), step=1, asynchronous=asynchronous)
        source = checkpoint.source.CheckpointReader(save.wait())
        assert source.tensors["model.base.weight"].properties.dtype == torch.bfloat16
        checkpoint.load(tmp_path, second, npuzero.AdamW(second.parameters()))
        assert_same_bits(*(npuzero.full_state_dict(model, rank0_only=False) for model in (second, first)))

    comm.run_threads(2, rank)


@pytest.mark.parametrize("plan", ("zero0", "zero3"))
def test_a_state_that_is_not_loaded_is_dropped(plan: str, tmp_path: Path) -> None:
    """As in torch's load_state_dict, a parameter that was never updated has no state."""

    def rank(world: World) -> None:
        training = CheckpointTraining(world, plan)
        fresh = training.optimizer.state_dict()
        training.save(tmp_path, 0)
        training.steps(0, 1)
        later = training.optimizer.state_dict()
        assert later["state"]
        training.optimizer.load_state_dict(fresh)
        assert training.optimizer.state_dict()["state"] == {}
        training.optimizer.load_state_dict(later)
        training.load(tmp_path)
        assert training.optimizer.state_dict()["state"] == {}
        training.steps(0, 1)
        for number, values in later["state"].items():
            assert_same_bits(training.optimizer.state_dict()["state"][number], values)

    comm.run_threads(2, rank)


def test_torchs_adamw_takes_ours_and_we_take_its(tmp_path: Path) -> None:
    def trained(world: World) -> CheckpointTraining:
        training = CheckpointTraining(world, "zero3")
        training.steps(0, 2)
        return training

    ours = comm.run_threads(2, lambda world: trained(world).optimizer.state_dict())[0]
    plain = build_seeded_model()
    vectors = [p for p in plain.parameters() if p.dim() < 2]
    matrices = [p for p in plain.parameters() if p.dim() >= 2]
    optimizer = torch.optim.AdamW([{"params": matrices}, {"params": vectors}])
    optimizer.load_state_dict(ours)
    assert_states(optimizer.state_dict(), ours)
    checkpoint_loss(plain, global_batch_tokens(0)).backward()
    optimizer.step()
    theirs = optimizer.state_dict()

    def takes(world: World) -> dict[str, Any]:
        training = CheckpointTraining(world, "hsdp", seed=1)
        training.optimizer.load_state_dict(theirs)
        return training.optimizer.state_dict()

    for found in comm.run_threads(2, takes):
        assert_states(found, theirs)


def assert_states(found: dict[str, Any], expected: dict[str, Any]) -> None:
    assert found["state"].keys() == expected["state"].keys()
    for number, values in expected["state"].items():
        assert_same_bits(found["state"][number], values)
    for mine, theirs in zip(found["param_groups"], expected["param_groups"], strict=True):
        assert mine["params"] == theirs["params"] and mine["lr"] == theirs["lr"]


# -- what each rank has for itself -------------------------------------------------------------------------------------


def test_random_numbers_go_on(tmp_path: Path) -> None:
    def draw() -> tuple[float, float, float]:
        return torch.rand(()).item(), random.random(), float(np.random.rand())

    world = comm.SingleWorld()
    training = CheckpointTraining(world, "zero1")
    training.save(tmp_path, 1)
    expected = draw()
    draw()
    training.load(tmp_path, rng=False)
    assert draw() != expected
    training.load(tmp_path)
    assert draw() == expected


def test_more_ranks_have_random_numbers_of_their_own() -> None:
    from npuzero.checkpoint import rng

    torch.manual_seed(5)
    state = rng.capture_rng_state(torch.device("cpu"))
    drawn = []
    for turn in (1, 2, 1):
        rng.set_derived_rng(state, torch.device("cpu"), turn)
        drawn.append((torch.rand(()).item(), random.random(), float(np.random.rand())))
    assert drawn[0] == drawn[2] and drawn[0] != drawn[1]


class MergedPosition(DataPosition):
    def load_state_dicts(self, states: list[dict[str, int]]) -> None:
        self.place = sum(state["place"] for state in states)


@pytest.mark.parametrize(
    ("places", "ranks", "kind", "expected"),
    [
        ((3, 4), 2, DataPosition, [3, 4]),
        ((7, 7), 3, DataPosition, [7, 7, 7]),
        ((3, 4), 3, MergedPosition, [7, 7, 7]),
        ((3, 3, 4), 2, MergedPosition, [10, 10]),
        ((3, 4), 1, DataPosition, CheckpointError),
    ],
)
def test_positions_in_the_data(places: Any, ranks: int, kind: Any, expected: Any, tmp_path: Path) -> None:
    comm.run_threads(
        len(places),
        lambda world: CheckpointTraining(world, "zero1").save(tmp_path, 1, data=DataPosition(places[world.rank])),
    )

    def read(world: World) -> int:
        position = kind()
        CheckpointTraining(world, "zero3").load(tmp_path, data=position)
        return position.place

    if expected is CheckpointError:
        with pytest.raises(CheckpointError, match="1 positions, one for each rank, or one for all; got 2 that differ"):
            comm.run_threads(ranks, read)
    else:
        assert comm.run_threads(ranks, read) == expected


class TensorExtraState(nn.Module):
    """A module with a tensor of variable size as its extra state."""

    scales = torch.ones(1)

    def get_extra_state(self) -> torch.Tensor:
        return self.scales * 1

    def set_extra_state(self, state: torch.Tensor) -> None:
        self.scales = state


class OddBuffers(nn.Module):
    """A module with buffers of several dtypes, and extra states."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 3)
        self.norm = nn.BatchNorm1d(3)
        self.register_buffer("mask", torch.rand(5) > 0.5)
        self.register_buffer("low", torch.randn(2, 2, dtype=torch.float16).t())
        self.register_buffer("words", torch.arange(4).to(torch.uint16))
        self.scaled = TensorExtraState()
        self.note = "first"

    def get_extra_state(self) -> dict[str, str]:
        return {"note": self.note}

    def set_extra_state(self, state: dict[str, str]) -> None:
        self.note = state["note"]


def test_buffers_and_extra_states(tmp_path: Path) -> None:
    def rank(world: World) -> None:
        first, second = (
            npuzero.zero(build_seeded_model(seed, OddBuffers), plan="zero3", world=world) for seed in (0, 1)
        )
        first.note, first.scaled.scales = "second", torch.tensor([2.0, 3.0])
        checkpoint.save(tmp_path, first, step=3, extra=[1, "two"])
        loaded = checkpoint.load(tmp_path, second)
        assert (loaded.step, loaded.extra, second.note) == (3, [1, "two"], "second")
        with npuzero.gathered(first), npuzero.gathered(second):
            expected = {name: value for name, value in first.state_dict().items() if isinstance(value, torch.Tensor)}
            assert_same_bits({name: second.state_dict()[name] for name in expected}, expected)

    comm.run_threads(2, rank)


# -- what does not fit -------------------------------------------------------------------------------------------------


def remove_last_block(model: Any) -> Any:
    del model.blocks[2]
    return model


def resize_unused(model: Any) -> Any:
    model.unused = nn.Parameter(torch.ones(6))
    return model


def add_extra_parameter(model: Any) -> Any:
    model.more = nn.Parameter(torch.ones(6))
    return model


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (remove_last_block, r"no tensors that the model does not have; got unknown 'model.blocks.2"),
        (add_extra_parameter, r"got \d+ of its \d+; missing 'more'"),
        (resize_unused, r"load model.unused: expected shape \(6,\); got shape \(5,\)"),
    ],
)
def test_another_model(change: Any, says: str, tmp_path: Path) -> None:
    def rank(world: World) -> None:
        CheckpointTraining(world, "zero3").save(tmp_path, 1)
        other = npuzero.zero(change(build_seeded_model()), plan="zero3", world=world)
        before = npuzero.full_state_dict(other, rank0_only=False)
        with pytest.raises(CheckpointError, match=says):
            checkpoint.load(tmp_path, other)
        assert_same_bits(npuzero.full_state_dict(other, rank0_only=False), before)

    comm.run_threads(2, rank)


def test_what_is_not_there(tmp_path: Path) -> None:
    def rank(world: World) -> None:
        training = CheckpointTraining(world, "zero3")
        with pytest.raises(CheckpointError, match="a complete checkpoint; got none"):
            training.load(tmp_path)
        checkpoint.save(tmp_path, training.model, step=1, rng=False)
        checkpoint.load(tmp_path, training.model)
        with pytest.raises(CheckpointError, match="one optimizer's state; got none"):
            training.load(tmp_path)
        for name in ("scheduler", "scaler", "data"):
            with pytest.raises(CheckpointError, match=f"{name}: expected a state of it; got none"):
                checkpoint.load(tmp_path, training.model, **{name: DataPosition()})

    comm.run_threads(2, rank)


def test_another_optimizer(tmp_path: Path) -> None:
    def rank(world: World) -> None:
        training = CheckpointTraining(world, "zero3")
        training.steps(0, 1)
        training.save(tmp_path, 1)
        other = npuzero.AdamW(reversed(training.groups()))
        checkpoint.load(tmp_path, training.model, other)  # the same groups, in another order
        assert [group["lr"] for group in other.param_groups] == [
            group["lr"] for group in reversed(training.optimizer.param_groups)
        ]
        adagrad = npuzero.ZeroOptimizer(torch.optim.SGD, training.groups(), lr=1.0, momentum=0.9)
        training.steps(1, 2)
        checkpoint.save(tmp_path, training.model, adagrad, step=2)
        checkpoint.load(tmp_path / "step-00000002", training.model, training.optimizer)

    comm.run_threads(2, rank)


def test_what_is_not_ours(tmp_path: Path) -> None:
    with pytest.raises(StateError, match=r"made by npuzero\.zero"):
        checkpoint.save(tmp_path, nn.Linear(2, 2), step=1)
    training = CheckpointTraining(comm.SingleWorld(), "zero3")
    with pytest.raises(ConfigError, match="an npuzero optimizer"):
        checkpoint.save(tmp_path, training.model, torch.optim.SGD(training.model.parameters()), step=1)
    with pytest.raises(ConfigError, match="2 parameters of others"):
        checkpoint.load(tmp_path, training.model, npuzero.AdamW(nn.Linear(2, 2).parameters()))


def test_elements_that_no_file_has(tmp_path: Path) -> None:
    """Two parts of a tensor overlap and leave as many elements out: uninitialized memory must not fill the gap."""
    comm.run_threads(2, lambda world: CheckpointTraining(world, "zero3").save(tmp_path, 1))
    path = checkpoint.latest(tmp_path)
    assert path is not None
    metadata = pickle.loads((path / ".metadata").read_bytes())
    key, second = next(
        (key, described.chunks[1])
        for key, described in metadata.state_dict_metadata.items()
        if len(getattr(described, "chunks", ())) == 2 and described.chunks[1].offsets[0]
    )
    index = next(index for index in metadata.storage_data if index.fqn == key and index.offset == second.offsets)
    second.offsets = torch.Size([second.offsets[0] - 1, *second.offsets[1:]])
    metadata.storage_data[replace(index, offset=second.offsets)] = metadata.storage_data.pop(index)
    replace_checkpoint_file(path, ".metadata", pickle.dumps(metadata))
    for ranks in (1, 2):
        with pytest.raises(CheckpointError, match=rf"{key}.*of which two have elements \[\d+:\d+"):
            comm.run_threads(ranks, lambda world: CheckpointTraining(world, "zero3").load(tmp_path))


# -- what nobody may smuggle in ----------------------------------------------------------------------------------------


class EvilPickle:
    def __reduce__(self) -> Any:
        return os.system, ("touch evil",)


def replace_checkpoint_file(path: Path, name: str, raw: bytes) -> None:
    """Replace a file, and update the manifest to match."""
    (path / name).write_bytes(raw)
    content = json.loads((path / files.MANIFEST).read_bytes().splitlines()[0])
    content["files"][name] = [len(raw), zlib.crc32(raw)]
    text = json.dumps(content).encode()
    (path / files.MANIFEST).write_bytes(text + b"\n%08x\n" % zlib.crc32(text))


@pytest.mark.parametrize("ours", (True, False))
def test_nothing_of_anybodys_is_run(ours: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    training = CheckpointTraining(comm.SingleWorld(), "zero3")
    path = training.save(tmp_path / "run", 1).wait()
    replace_checkpoint_file(path, ".metadata", pickle.dumps(EvilPickle()))
    if not ours:
        (path / files.MANIFEST).unlink()
    with pytest.raises(CheckpointError, match=r"posix\.system is not let in"):
        training.load(path)
    assert not (tmp_path / "evil").exists()


def test_no_file_beyond_the_folder_is_read(tmp_path: Path) -> None:
    training = CheckpointTraining(comm.SingleWorld(), "zero3")
    path = training.save(tmp_path, 1).wait()
    metadata = pickle.loads((path / ".metadata").read_bytes())
    for info in metadata.storage_data.values():
        info.relative_path = "../" + info.relative_path
    replace_checkpoint_file(path, ".metadata", pickle.dumps(metadata))
    with pytest.raises(CheckpointError, match=r"\.\./__0_0.distcp"):
        training.load(path)
