"""Whole weights out of cut models into safetensors files, as transformers and safetensors read them."""

from __future__ import annotations

import errno
import json
import os
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import nn
from transformers import AutoModelForCausalLM, AutoModelForImageClassification, AutoModelForSeq2SeqLM, PreTrainedModel

import npuzero
from models.training import make_stirred_model
from models.zoo import ZOO, zoo_batch
from npuzero import comm
from npuzero.checkpoint import latest, save
from npuzero.checkpoint.weight_files import export as exporting
from npuzero.cli import main
from npuzero.comm import World
from npuzero.errors import ConfigError, StateError, StorageError
from npuzero.shard.find_engine import engine_of
from world.test_modules import TiedBlocksGPT
from world.test_state import NormalizedModel
from world.toy import ToyGPT, build_seeded_model, toy_loss, toy_tokens
from world.train import State, assert_same_bits

AUTO = {"vit": AutoModelForImageClassification, "t5": AutoModelForSeq2SeqLM}


def train_for_export(world: World, name: str, **options: Any) -> Any:
    """A cut model after one step."""
    model = npuzero.zero(build_seeded_model(make=make_stirred_model(name)), world=world, **options)
    model(**zoo_batch(model, 0, 0, world.rank)).loss.backward()
    npuzero.AdamW(model.parameters(), lr=1e-2).step()
    return model


def load_by_transformers(name: str, folder: Path, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """The model that transformers loads from ``folder``; it must find every weight there."""
    ZOO[name]().config.save_pretrained(folder)
    kind = AUTO.get(name, AutoModelForCausalLM)
    model, said = kind.from_pretrained(folder, dtype=dtype, output_loading_info=True)
    assert not said["missing_keys"] and not said["unexpected_keys"] and not said["mismatched_keys"], said
    return model


@pytest.mark.parametrize("name", ZOO)
def test_transformers_loads_what_is_exported(name: str, tmp_path: Path) -> None:
    def rank(world: World) -> State:
        model = train_for_export(world, name, plan="zero3")
        npuzero.export(model, tmp_path)
        return npuzero.full_state_dict(model, rank0_only=False)

    expected = comm.run_threads(2, rank)[0]
    loaded = load_by_transformers(name, tmp_path)
    assert_same_bits({key: value.detach() for key, value in loaded.state_dict().items()}, expected)


@pytest.mark.parametrize("name", ["mixtral", "t5"])
def test_several_files_and_their_index(name: str, tmp_path: Path) -> None:
    def rank(world: World) -> State:
        model = train_for_export(world, name, plan="zero3")
        npuzero.export(model, tmp_path, file_bytes=10_000)
        return npuzero.full_state_dict(model, rank0_only=False)

    expected = comm.run_threads(2, rank)[0]
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    files = sorted(set(index["weight_map"].values()))
    assert len(files) > 2 and {path.name for path in tmp_path.iterdir()} == {*files, "model.safetensors.index.json"}
    assert files[0] == f"model-00001-of-{len(files):05}.safetensors"
    for file in files:
        with safe_open(tmp_path / file, framework="pt") as opened:
            assert opened.metadata() == {"format": "pt"}
            assert {index["weight_map"][key] for key in opened.keys()} == {file}  # noqa: SIM118
        tensors = load_file(tmp_path / file).values()
        assert len(tensors) == 1 or sum(tensor.nbytes for tensor in tensors) <= 10_000
    loaded = load_by_transformers(name, tmp_path)
    assert_same_bits({key: value.detach() for key, value in loaded.state_dict().items()}, expected)


@pytest.mark.parametrize("plan", npuzero.PRESETS)
@pytest.mark.parametrize("make", [ToyGPT, TiedBlocksGPT, NormalizedModel])
def test_every_plan_exports_the_same_bits(make: Any, plan: str, tmp_path: Path) -> None:
    """Scalars, empty and tied tensors, buffers of several dtypes; pieces that cross the ranks' shards."""

    def rank(world: World) -> State:
        model = npuzero.zero(build_seeded_model(make=make), plan=plan, local_size=2, world=world)
        npuzero.export(model, tmp_path)
        return npuzero.full_state_dict(model, rank0_only=False)

    before, exporting.PIECE = exporting.PIECE, 100
    try:
        expected = comm.run_threads(4, rank)[0]
    finally:
        exporting.PIECE = before
    found = load_file(tmp_path / "model.safetensors")
    once = {name: value for name, value in expected.items() if name in found}
    assert_same_bits(found, once)
    assert len({id(value) for value in expected.values()}) == len(found), "each tensor once"
    assert list(once) == sorted(found, key=list(expected).index), "under its first name"


def test_dtypes(tmp_path: Path) -> None:
    """bfloat16 parameters go out as they are, or as the float32 masters that they are rounded from."""

    def rank(world: World) -> State:
        model = train_for_export(world, "llama", plan="zero3", precision="bf16")
        for dtype in (None, "fp32", torch.bfloat16):
            npuzero.export(model, tmp_path / str(dtype), dtype=dtype)
        masters = {}
        for flat in engine_of(model).flats():
            whole = engine_of(model).values.gather_states(flat, flat.master)
            masters |= {s.name: whole[s.begin : s.end].view(s.shape) for s in flat.layout.slots}
        return masters

    masters = comm.run_threads(2, rank)[0]
    kept, exact, rounded = (load_file(tmp_path / str(d) / "model.safetensors") for d in (None, "fp32", torch.bfloat16))
    assert_same_bits(exact, {name: masters[name] for name in exact})
    assert_same_bits(kept, {name: value.bfloat16() for name, value in exact.items()})
    assert_same_bits(rounded, kept)
    assert any(not torch.equal(value, value.bfloat16().float()) for value in exact.values())


def test_some_tensors_by_other_names_in_one_file(tmp_path: Path) -> None:
    def rank(world: World) -> None:
        model = npuzero.zero(build_seeded_model(), plan="zero3", world=world)
        npuzero.export(
            model,
            tmp_path / "deep" / "norms.safetensors",
            rename=lambda name: f"my.{name}" if "norm" in name else None,
        )

    comm.run_threads(2, rank)
    expected = {f"my.{name}": value for name, value in build_seeded_model().state_dict().items() if "norm" in name}
    assert_same_bits(load_file(tmp_path / "deep" / "norms.safetensors"), expected)


def test_an_older_export_is_replaced(tmp_path: Path) -> None:
    """Of several files, of one, and again: no file of the other stays, and what is not an export does."""
    (tmp_path / "config.json").write_text("{}")

    def rank(world: World) -> None:
        model = npuzero.zero(build_seeded_model(), plan="zero3", world=world)
        for file_bytes in (4_000, 6_000, 10**9, 4_000):
            npuzero.export(model, tmp_path, file_bytes=file_bytes)
            if world.rank == 0:
                index = tmp_path / "model.safetensors.index.json"
                expected = {"model.safetensors"}
                if file_bytes < 10**9:
                    expected = {index.name, *json.loads(index.read_text())["weight_map"].values()}
                assert {path.name for path in tmp_path.iterdir()} == expected | {"config.json"}

    comm.run_threads(2, rank)
    assert (tmp_path / "config.json").read_text() == "{}"


@pytest.mark.parametrize("fails", ["write", "replace"])
def test_a_full_disk_is_an_error_on_every_rank(fails: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was there stays readable or is gone, and nothing half-written remains."""

    def full(*_: Any) -> Any:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(*{"write": (os, "fsync", full), "replace": (os, "replace", full)}[fails])

    def rank(world: World) -> None:
        model = npuzero.zero(build_seeded_model(), plan="zero3", world=world)
        with pytest.raises(StorageError, match="No space left"):
            npuzero.export(model, tmp_path, file_bytes=4_000)
        toy_loss(model, toy_tokens(0, 0, world.rank)).backward()  # the ranks are still together

    comm.run_threads(2, rank)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "fails", [".model.safetensors.partial", ".model-00002-of-*", ".model.safetensors.index.json.partial"]
)
def test_a_disk_that_fills_up_is_an_error_on_every_rank(fails: str, tmp_path: Path) -> None:
    """The kernel's own error, which comes when a buffer is written out; nothing is left, nor the folder."""

    def rank(world: World) -> None:
        model = npuzero.zero(build_seeded_model(), plan="zero3", world=world)
        several = fails != ".model.safetensors.partial"
        names = [".model.safetensors.partial"]
        if several:
            npuzero.export(model, tmp_path / "whole", file_bytes=4_000)
            names = [f".{path.name}.partial" for path in (tmp_path / "whole").iterdir()]
        world.exchange(None)
        if world.rank == 0:
            (tmp_path / "out").mkdir()
            (full,) = (name for name in names if fnmatch(name, fails))
            (tmp_path / "out" / full).symlink_to("/dev/full")
        world.exchange(None)
        with pytest.raises(StorageError, match="No space left"):
            npuzero.export(model, tmp_path / "out", **{"file_bytes": 4_000} if several else {})
        toy_loss(model, toy_tokens(0, 0, world.rank)).backward()  # the ranks are still together

    comm.run_threads(2, rank, timeout_s=20.0)
    assert not list((tmp_path / "out").iterdir())


def test_a_place_that_cannot_be_written_is_an_error_on_every_rank(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("a file")

    def rank(world: World) -> None:
        model = npuzero.zero(build_seeded_model(), plan="zero3", world=world)
        for place in (
            tmp_path / "file" / "below",
            tmp_path / ("x" * 300),
            tmp_path / "new" / ("x" * 300 + ".safetensors"),
        ):
            with pytest.raises(StorageError, match=r"Not a directory|File name too long"):
                npuzero.export(model, place)

    comm.run_threads(2, rank, timeout_s=20.0)
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_what_cannot_be_exported_is_refused(tmp_path: Path) -> None:
    def rank(world: World) -> None:
        model = npuzero.zero(build_seeded_model(), plan="zero3", world=world)
        with pytest.raises(ConfigError, match="dtype"):
            npuzero.export(model, tmp_path, dtype="int8")
        with pytest.raises(ConfigError, match="file_bytes"):
            npuzero.export(model, tmp_path, file_bytes=0)
        with pytest.raises(ConfigError, match="twice"):
            npuzero.export(model, tmp_path, rename=lambda name: "one")
        with pytest.raises(StateError, match=r"npuzero\.zero"):
            npuzero.export(build_seeded_model(), tmp_path)

    comm.run_threads(2, rank)
    assert not list(tmp_path.iterdir())


# -- out of a checkpoint, by the command -------------------------------------------------------------------------------


@pytest.mark.parametrize("precision", [None, "bf16"])
def test_the_command_exports_a_checkpoint(precision: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Without the model's class; the last checkpoint of the run; what is tied once."""

    def rank(world: World) -> None:
        model = train_for_export(world, "t5", plan="zero3", precision=precision)
        save(tmp_path / "run", model, step=1)
        npuzero.export(model, tmp_path / "live", dtype="fp32")

    comm.run_threads(2, rank)
    files = [str(tmp_path / name) for name in ("run", "whole")]
    assert main(["export", *files]) == 0
    assert "tensors" in capsys.readouterr().out
    expected = load_file(tmp_path / "live" / "model.safetensors")
    assert_same_bits(load_file(tmp_path / "whole" / "model.safetensors"), expected)
    load_by_transformers("t5", tmp_path / "whole")
    assert main(["export", str(latest(tmp_path / "run")), str(tmp_path / "low.safetensors"), "--dtype", "bf16"]) == 0
    low = load_file(tmp_path / "low.safetensors")
    assert_same_bits(low, {name: value.bfloat16() for name, value in expected.items()})
    assert main(["export", *files, "--file-bytes", "1e4"]) == 0
    assert len(list((tmp_path / "whole").glob("model-*-of-*.safetensors"))) > 2
    load_by_transformers("t5", tmp_path / "whole")


def test_the_command_says_what_is_wrong(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["export", str(tmp_path), str(tmp_path / "out")]) == 2
    assert "CheckpointError" in capsys.readouterr().err
    model = npuzero.zero(build_seeded_model(), 0, world=comm.SingleWorld())
    save(tmp_path, model, step=3)
    data = max(latest(tmp_path).iterdir(), key=lambda path: path.stat().st_size)
    raw = bytearray(data.read_bytes())
    raw[len(raw) // 2] ^= 1
    data.write_bytes(raw)
    assert main(["export", str(tmp_path), str(tmp_path / "out")]) == 2
    assert data.name in capsys.readouterr().err
    assert not (tmp_path / "out" / "model.safetensors").exists()


class NotedLinear(nn.Linear):
    def get_extra_state(self) -> str:
        return "more"


def test_an_extra_state_is_refused_or_left_out(tmp_path: Path) -> None:
    def rank(world: World) -> None:
        model = npuzero.zero(NotedLinear(2, 2), plan="zero3", world=world)
        with pytest.raises(ConfigError, match="extra state"):
            npuzero.export(model, tmp_path)
        npuzero.export(model, tmp_path, rename=lambda name: None if name == "_extra_state" else name)

    comm.run_threads(2, rank)
    assert load_file(tmp_path / "model.safetensors").keys() == {"weight", "bias"}
