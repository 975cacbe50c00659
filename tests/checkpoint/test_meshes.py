"""Checkpoints of tensor-parallel models: saved on any mesh, loaded on any other."""

from __future__ import annotations

import pickle
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.distributed import checkpoint as dcp

import npuzero
from npuzero import checkpoint, comm
from npuzero.checkpoint import CutTensor
from npuzero.checkpoint.formats.item_files import MANIFEST, data_file_name
from npuzero.checkpoint.layout.parts import SlotPiece
from npuzero.checkpoint.source import CheckpointReader
from npuzero.comm import World
from npuzero.plan import DATA as AXES
from npuzero.plan import Cut, Relation, TensorPortion
from npuzero.shard.layout.axis_relations import relate_parameter
from npuzero.shard.layout.flat_layout import FlatSlot
from npuzero.shard.layout.tiled_linear import TileRows
from world.cutting import CutWordsModel, build_cut_model, train_cut_words
from world.toy import build_seeded_model
from world.train import assert_same_bits, assert_states_close

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning:torch.*")

#: The number of ranks, of tensor ranks among them, and the plan.
Where = tuple[int, int, str]
State = dict[str, Tensor]

CUT, DATA, ALONE, WIDE = (4, 2, "zero3"), (4, 1, "zero3"), (1, 1, "zero1"), (4, 4, "zero2")


def full_training_state(model: Any, optimizer: Any) -> State:
    """Return the full tensors by name, the optimizer's included."""
    state = npuzero.full_state_dict(model, rank0_only=False)
    named = [name for name, _ in model.named_parameters()]
    for number, its in optimizer.state_dict()["state"].items():
        state |= {f"{named[number]}.{kind}": value for kind, value in its.items()}
    return state


def build_on_mesh(world: World, where: Where, seed: int = 0, **options: Any) -> tuple[Any, Any, Any]:
    _, tensor, plan = where
    model, mesh = build_cut_model(world, tensor, plan, seed, **options)
    return model, mesh, npuzero.AdamW(model.parameters(), lr=0.01, weight_decay=0.1)


def save_from_mesh(where: Where, folder: Path, asynchronous: bool = False, **options: Any) -> State:
    """Train three steps and save; return the saved state."""

    def rank(world: World) -> State:
        model, mesh, optimizer = build_on_mesh(world, where, **options)
        train_cut_words(model, mesh, optimizer, range(3))
        saving = checkpoint.save(folder, model, optimizer, step=3, asynchronous=asynchronous)
        state = full_training_state(model, optimizer)
        if asynchronous:
            train_cut_words(model, mesh, optimizer, range(3, 5))
        saving.wait()
        return state

    states = comm.run_threads(where[0], rank)
    for state in states:
        assert_same_bits(state, states[0])
    return states[0]


def load_on_mesh(world: World, where: Where, folder: Path, more: int = 0, **options: Any) -> State:
    model, mesh, optimizer = build_on_mesh(world, where, seed=9, **options)
    assert checkpoint.load(folder, model, optimizer).step == 3
    train_cut_words(model, mesh, optimizer, range(3, 3 + more))
    return full_training_state(model, optimizer)


@cache
def train_in_one_process(steps: int) -> State:
    """Train the same steps without interruption, on one rank."""

    def rank(world: World) -> State:
        model, mesh, optimizer = build_on_mesh(world, ALONE)
        train_cut_words(model, mesh, optimizer, range(steps))
        return full_training_state(model, optimizer)

    return comm.run_threads(1, rank)[0]


def check_mesh_to_mesh(first: Where, second: Where, folder: Path) -> None:
    expected = save_from_mesh(first, folder)
    assert_states_close(expected, train_in_one_process(3), 1e-4)
    checkpoint.verify(folder)
    for state in comm.run_threads(second[0], lambda world: load_on_mesh(world, second, folder)):
        assert_same_bits(state, expected)
    for state in comm.run_threads(second[0], lambda world: load_on_mesh(world, second, folder, more=2)):
        assert_states_close(state, train_in_one_process(5), 1e-4)


@pytest.mark.parametrize(("first", "second"), [(CUT, DATA), (DATA, CUT), (CUT, ALONE), (CUT, WIDE), (WIDE, CUT)])
def test_a_mesh_goes_on_where_another_stopped(first: Where, second: Where, tmp_path: Path) -> None:
    check_mesh_to_mesh(first, second, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize(
    "second", [ALONE, (2, 2, "zero0"), (3, 3, "zero3"), (4, 2, "zero1"), (6, 2, "hpz"), (6, 3, "hsdp")]
)
@pytest.mark.parametrize(
    "first", [(2, 2, "zero0"), (3, 3, "zero3"), (4, 2, "zero1.5"), (6, 2, "zero2"), (6, 3, "zero3")]
)
def test_every_mesh_goes_on_where_another_stopped(first: Where, second: Where, tmp_path: Path) -> None:
    check_mesh_to_mesh(first, second, tmp_path)


@st.composite
def tensor_portions(draw: st.DrawFn) -> TensorPortion:
    """Return this rank's part of a tensor of one to four dimensions, cut along any of them."""
    count = draw(st.integers(2, 3))
    spans = tuple(count * k for k in draw(st.lists(st.integers(1, 3), max_size=3)))
    shape = draw(st.lists(st.integers(1, 4), min_size=1, max_size=4))
    dim = draw(st.integers(0, len(shape) - 1))
    shape[dim] = sum(spans) or count * shape[dim]
    return TensorPortion(Cut("tensor", dim, spans), torch.Size(shape), count, draw(st.integers(0, count - 1)))


@settings(max_examples=200, deadline=None)
@given(tensor_portions(), st.data(), st.none() | st.integers(1, 30))
def test_boxes_of_a_part_are_where_the_whole_has_them(
    portion: TensorPortion, data: st.DataObject, limit: int | None
) -> None:
    """Each element of any range of a part is in one box of the tensor, and equals the tensor's element there."""
    whole = torch.arange(portion.whole.numel()).view(portion.whole)
    begin = 16
    slot = FlatSlot("weight", portion.shape, begin)
    flat = torch.full((slot.end + 5,), -1)
    flat[begin : slot.end] = portion.take(whole).reshape(-1)
    first = data.draw(st.integers(begin, slot.end))
    last = data.draw(st.integers(first, slot.end))
    found = []
    for site in SlotPiece(slot, TileRows("weight", portion.whole, 0), portion).sites(first, last, limit):
        values = site.of(flat[slice(*site.range)])
        at = tuple(slice(o, o + n) for o, n in zip(site.box.offsets, site.box.sizes, strict=True))
        assert torch.equal(values, whole[at])
        found += values.reshape(-1).tolist()
    assert sorted(found) == sorted(flat[first:last].tolist())


def test_a_save_beside_training_has_what_was_there_when_it_began(tmp_path: Path) -> None:
    expected = save_from_mesh(CUT, tmp_path, asynchronous=True)
    for state in comm.run_threads(2, lambda world: load_on_mesh(world, (2, 2, "zero2"), tmp_path)):
        assert_same_bits(state, expected)


@pytest.mark.parametrize("precision", ["bf16", "bf16-split"])
def test_masters_keep_their_bits(precision: str, tmp_path: Path) -> None:
    def rank(world: World) -> None:
        model, mesh, optimizer = build_on_mesh(world, CUT, precision=precision)
        train_cut_words(model, mesh, optimizer, range(3))
        checkpoint.save(tmp_path, model, optimizer, step=3)
        npuzero.export(model, tmp_path / "masters.safetensors", dtype="fp32")

    comm.run_threads(4, rank)
    masters = load_file(tmp_path / "masters.safetensors")
    state = comm.run_threads(1, lambda world: load_on_mesh(world, ALONE, tmp_path))[0]
    assert_same_bits({name: state[name] for name in masters}, masters)


@pytest.mark.parametrize("options", [{"offload": "host"}, {"offload": "host+parameters"}])
def test_states_off_the_device(options: Any, tmp_path: Path) -> None:
    expected = save_from_mesh(CUT, tmp_path, **options)
    for state in comm.run_threads(4, lambda world: load_on_mesh(world, (4, 4, "zero3"), tmp_path, **options)):
        assert_same_bits(state, expected)


def test_an_update_that_is_pending(tmp_path: Path) -> None:
    expected = save_from_mesh((4, 2, "delayed"), tmp_path)
    assert any(name.endswith(".ahead") for name in expected)
    for state in comm.run_threads(2, lambda world: load_on_mesh(world, (2, 2, "delayed"), tmp_path)):
        assert_same_bits(state, expected)


def test_parts_that_leave_holes_are_refused(tmp_path: Path) -> None:
    """Move the columns of one tensor rank onto those of another."""
    save_from_mesh(CUT, tmp_path)
    path = checkpoint.latest(tmp_path)
    assert path is not None
    metadata = pickle.loads((path / ".metadata").read_bytes())
    key = "model.layers.0.down.weight"
    chunk = next(chunk for chunk in metadata.state_dict_metadata[key].chunks if chunk.offsets[1])
    index = next(index for index in metadata.storage_data if (index.fqn, index.offset) == (key, chunk.offsets))
    chunk.offsets = torch.Size([chunk.offsets[0], chunk.offsets[1] - 1])
    metadata.storage_data[replace(index, offset=chunk.offsets)] = metadata.storage_data.pop(index)
    (path / ".metadata").write_bytes(pickle.dumps(metadata))
    (path / MANIFEST).unlink()  # it has the checksum; without it another program may have written the checkpoint
    for where in (CUT, ALONE):
        with pytest.raises(npuzero.CheckpointError, match=rf"{key}.*so that others are missing"):
            comm.run_threads(where[0], lambda world, where=where: load_on_mesh(world, where, path))


def test_what_ranks_repeat_is_written_once_by_the_first(tmp_path: Path) -> None:
    save_from_mesh(CUT, tmp_path)
    source = CheckpointReader(checkpoint.latest(tmp_path))
    files = {key: {file for file, _ in source.places(key)} for key in source.tensors if key.startswith("model.layers")}
    repeated = set().union(*(found for key, found in files.items() if "norm" in key))
    assert repeated <= {data_file_name(0), data_file_name(2)}  # of four ranks those with tensor index 0
    assert set().union(*files.values()) == {data_file_name(rank) for rank in range(4)}


class PlacesPosition:
    """Store a rank's position in its data."""

    def __init__(self, *places: int) -> None:
        self.places = [*places]

    def state_dict(self) -> dict[str, int]:
        return {"place": self.places[0]}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.load_state_dicts([state])

    def load_state_dicts(self, states: list[dict[str, int]]) -> None:
        self.places = [state["place"] for state in states]


def test_positions_in_the_data_are_those_of_data_ranks(tmp_path: Path) -> None:
    def rank(world: World, where: Where) -> list[int]:
        model, mesh, _ = build_on_mesh(world, where)
        position = PlacesPosition(10 * mesh.index(AXES) + 1)
        if where is CUT:
            checkpoint.save(tmp_path, model, step=3, data=position)
        checkpoint.load(tmp_path, model, data=position)
        return position.places

    assert comm.run_threads(4, lambda world: rank(world, CUT)) == [[1], [1], [11], [11]]
    for where in (DATA, WIDE):
        assert comm.run_threads(4, lambda world, where=where: rank(world, where)) == [[1, 11]] * 4


@pytest.mark.parametrize("way", ["save", "export", "state_dict"])
def test_different_elements_of_which_nobody_has_said_where_they_belong(way: str, tmp_path: Path) -> None:
    def rank(world: World) -> None:
        model = nn.Linear(3, 3)
        relate_parameter(model.weight, "tensor", Relation.CUT)
        npuzero.zero(model, mesh=npuzero.mesh(tensor=2, world=world))
        ways = {
            "save": lambda: checkpoint.save(tmp_path, model, step=1),
            "export": lambda: npuzero.export(model, tmp_path / "out.safetensors"),
            "state_dict": lambda: checkpoint.state_dict(model),
        }
        with pytest.raises(npuzero.ConfigError, match=r"weight, cut along tensor"):
            ways[way]()

    comm.run_threads(2, rank)


def test_torch_reads_whole_tensors(tmp_path: Path) -> None:
    expected = save_from_mesh(CUT, tmp_path)
    model = build_seeded_model(seed=9, make=CutWordsModel)
    state = {"model": model.state_dict()}
    dcp.load(state, checkpoint_id=checkpoint.latest(tmp_path), no_dist=True)
    found = state["model"]
    assert_same_bits(found, {name: expected[name] for name in found})


def test_boxes_for_torchs_own_checkpoints(tmp_path: Path) -> None:
    """Every box that torch.distributed.checkpoint would write or fill is at its place in the full tensor."""
    expected = train_in_one_process(3)
    parameters = [name for name, _ in build_seeded_model(make=CutWordsModel).named_parameters()]

    def rank(world: World) -> State:
        model, _, optimizer = build_on_mesh(world, CUT, seed=9)
        state = checkpoint.state_dict(model, optimizer)
        found = {name: state["model"][name] for name in expected if name in state["model"]}
        found |= {f"{n}.{kind}": v for n in parameters for kind, v in state["optim"]["state"][n].items()}
        for name, value in found.items():
            if isinstance(value, CutTensor):
                assert value.shape == expected[name].shape
                for box, there in value.boxes:
                    at = tuple(slice(o, o + n) for o, n in zip(box.offsets, box.sizes, strict=True))
                    there.copy_(expected[name][at])
            else:
                value.copy_(expected[name])
        checkpoint.load_state_dict(model, optimizer, state=state)
        return full_training_state(model, optimizer)

    for state in comm.run_threads(4, rank):
        assert_same_bits(
            {n: v for n, v in state.items() if "calls" not in n},
            {n: v for n, v in expected.items() if "calls" not in n},
        )
