"""Parameters cut over tensor ranks: states are unsharded on save and load, and equal to one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import npuzero
import npuzero.checkpoint.weight_files.export as exporting
from npuzero import ConfigError, StateError, comm, observe
from npuzero.comm import World
from npuzero.plan import DATA, Cut
from npuzero.shard.layout import tensor_slices as cuts
from npuzero.shard.layout.tensor_slices import cut_parameter
from npuzero.shard.parameters import full_parameters as values
from world.cutting import (
    DIM,
    HIDDEN,
    TENSOR,
    CutLayer,
    CutWordsModel,
    build_cut_model,
    cut_batch,
    cut_model,
    cut_model_loss,
    find_cut,
    tensor_mesh,
    train_cut_words,
    train_words_plain,
)
from world.toy import build_seeded_model
from world.train import assert_same_bits, assert_states_close

State = dict[str, Tensor]


def full_cut_state(model: nn.Module) -> State:
    return npuzero.full_state_dict(model, rank0_only=False)


def first_values(seed: int = 0) -> State:
    return {name: value.detach() for name, value in build_seeded_model(seed, make=CutWordsModel).state_dict().items()}


@pytest.mark.parametrize(("size", "tensor"), [(2, 2), (4, 2), (3, 3)])
@pytest.mark.parametrize("plan", ["zero0", "zero2", "zero3"])
def test_training_is_that_of_one_process(plan: str, size: int, tensor: int) -> None:
    def rank(world: World) -> State:
        model, mesh = build_cut_model(world, tensor, plan)
        optimizer = npuzero.ZeroOptimizer(torch.optim.SGD, model.parameters(), lr=0.1, momentum=0.9)
        norms = train_cut_words(model, mesh, optimizer, range(4))
        report = npuzero.report(model)
        predicted = npuzero.predict(
            cut_model(build_seeded_model(make=CutWordsModel), mesh), plan, mesh, clip=True, moments=0
        )
        assert report.bytes_held == predicted.bytes_held and report.bytes_sent == predicted.bytes_sent
        return {"norms": torch.stack(norms), **full_cut_state(model)}

    states = comm.run_threads(size, rank)
    for state in states:
        assert_same_bits(state, states[0])
    assert_states_close(states[0], train_words_plain(4), 1e-6)


@pytest.mark.parametrize("plan", ["zero0", "zero3"])
def test_each_rank_has_its_part_of_what_rank_0_has_built(plan: str) -> None:
    def rank(world: World) -> None:
        model, mesh = build_cut_model(world, 2, plan, seed=world.rank)
        expected = first_values()
        assert_same_bits(full_cut_state(model), expected)
        with npuzero.gathered(model):
            for name, parameter in model.named_parameters():
                how = find_cut(name)
                part = expected[name] if how is None else how.take(expected[name], 2, mesh.index(TENSOR))
                assert torch.equal(parameter, part), name
        with pytest.raises(StateError, match="load_full_state_dict"):
            model.load_state_dict(expected)

    comm.run_threads(4, rank)


def test_initialisation_sees_whole_tensors_a_unit_at_a_time() -> None:
    generator = torch.Generator()

    def fill(module: nn.Module, generator: torch.Generator, seen: list[Any]) -> None:
        for name, tensor in (*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)):
            if not tensor.is_meta:
                seen.append((name, tuple(tensor.shape)))
                with torch.no_grad():
                    tensor.normal_(generator=generator)

    def rank(world: World) -> tuple[State, list[Any]]:
        seen: list[Any] = []
        mesh, own = tensor_mesh(world, 2), torch.Generator().manual_seed(world.rank)
        with torch.device("meta"):
            model = cut_model(CutWordsModel(), mesh)
        whole_numel = sum(parameter.numel() for parameter in model.parameters())
        most = 0

        def initialize(module: nn.Module) -> None:
            nonlocal most
            fill(module, own, seen)
            most = max(most, sum(p.numel() for p in model.parameters() if not p.is_meta))

        model = npuzero.zero(model, stage=3, mesh=mesh, initialize=initialize)
        assert most < whole_numel
        return full_cut_state(model), seen

    def alone(world: World) -> State:
        with torch.device("meta"):
            model = CutWordsModel()
        generator.manual_seed(0)
        return full_cut_state(npuzero.zero(model, world=world, initialize=lambda module: fill(module, generator, [])))

    expected = comm.run_threads(1, alone)[0]
    for state, seen in comm.run_threads(4, rank):
        assert_same_bits(state, expected)
        assert {("weight", (2 * HIDDEN, DIM)), ("packed", (DIM, 2 * HIDDEN)), ("weight", (DIM, HIDDEN))} <= {*seen}


def test_modules_initialise_themselves_on_every_rank() -> None:
    def rank(world: World) -> State:
        mesh = tensor_mesh(world, 2)
        with torch.device("meta"):
            model = cut_model(CutWordsModel(), mesh)
        return full_cut_state(npuzero.zero(model, stage=3, mesh=mesh))

    states = comm.run_threads(2, rank)
    assert_same_bits(states[1], states[0])
    assert states[0]["layers.0.gate_up.weight"].shape == (2 * HIDDEN, DIM)
    assert states[0]["layers.0.gate_up.weight"].unique().numel() == 2 * HIDDEN * DIM


@pytest.mark.parametrize("plan", ["zero0", "zero3"])
def test_files_give_each_rank_its_part_and_no_more_of_ranges(plan: str, tmp_path: Path) -> None:
    expected = first_values(3)
    save_file({n: v for n, v in expected.items() if n != "head.weight"}, tmp_path / "model.safetensors")
    events = observe.Events()

    def rank(world: World) -> None:
        mesh = tensor_mesh(world, 2)
        with torch.device("meta"):
            model = cut_model(CutWordsModel(), mesh)
        npuzero.zero(model, plan=plan, mesh=mesh, weights=tmp_path)
        assert_same_bits(full_cut_state(model), expected)

    with observe.recording(events):
        comm.run_threads(4, rank)
    read = dict.fromkeys(range(4), 0)
    for event in events.events:
        if event.category == "weights" and "gate_up" in event.facts["tensor"]:
            read[event.rank] += event.facts["nbytes"]
    packed = sum(value.nbytes for name, value in expected.items() if "gate_up" in name)
    if plan == "zero0":
        assert read == dict.fromkeys(range(4), packed // 2)
    else:
        assert sum(read.values()) == packed


@pytest.mark.parametrize(("plan", "piece"), [("zero3", 7), ("zero0", 50), ("zero0", 2**20), ("zero3", 2**20)])
def test_whole_tensors_go_in_and_files_of_them_come_out(
    plan: str, piece: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Any range within a piece: parts of a row, a row, all of it."""
    other = first_values(5)
    for module in (cuts, exporting, values):
        monkeypatch.setattr(module, "PIECE", piece)

    def rank(world: World) -> None:
        model, _ = build_cut_model(world, 2, plan)
        given = other if world.rank == 0 else {name: torch.zeros_like(value) for name, value in other.items()}
        npuzero.load_full_state_dict(model, given)
        assert_same_bits(full_cut_state(model), other)
        assert npuzero.full_state_dict(model).keys() == (other.keys() if world.rank == 0 else set())
        npuzero.export(model, tmp_path / "out.safetensors")
        with pytest.raises(npuzero.CheckpointError, match=r"gate_up.*shape \(48, 12\)"):
            parts = {n: v[: len(v) // 2] if "gate_up" in n else v for n, v in other.items()}
            npuzero.load_full_state_dict(model, parts)

    comm.run_threads(4, rank)
    found = load_file(tmp_path / "out.safetensors")
    assert_same_bits({**found, "head.weight": found["tokens.weight"]}, other)

    def again(world: World) -> None:
        mesh = tensor_mesh(world, 2)
        with torch.device("meta"):
            model = cut_model(CutWordsModel(), mesh)
        weights = npuzero.Weights(tmp_path / "out.safetensors")
        assert_same_bits(full_cut_state(npuzero.zero(model, plan=plan, mesh=mesh, weights=weights)), other)

    comm.run_threads(4, again)


def test_masters_are_exported_unrounded(tmp_path: Path) -> None:
    other = first_values(5)

    def rank(world: World) -> None:
        model, _ = build_cut_model(world, 2, "zero2", precision="bf16")
        npuzero.load_full_state_dict(model, other)
        npuzero.export(model, tmp_path / "out.safetensors", dtype="fp32")

    comm.run_threads(4, rank)
    found = load_file(tmp_path / "out.safetensors")
    assert_same_bits({**found, "head.weight": found["tokens.weight"]}, other)


def test_gradients_and_states_of_optimizers_are_whole() -> None:
    def run(world: World, tensor: int, given: Any = None) -> tuple[Any, State, Any]:
        model, mesh = build_cut_model(world, tensor, "zero3")
        optimizer = npuzero.AdamW(model.parameters(), lr=0.01)
        train_cut_words(model, mesh, optimizer, range(2))
        state = optimizer.state_dict()
        if given is not None:
            optimizer.load_state_dict(given)
            again = optimizer.state_dict()
            for number, its in given["state"].items():
                assert_same_bits(again["state"][number], its)
        cut_model_loss(model, cut_batch(7, mesh.index(DATA), mesh.size(DATA))).backward()
        gradients = {name: npuzero.full_gradient(parameter) for name, parameter in model.named_parameters()}
        return state, gradients, full_cut_state(model)

    expected, gradients, values = comm.run_threads(1, lambda world: run(world, 1))[0]
    for found, its, state in comm.run_threads(4, lambda world: run(world, 2, expected)):
        assert_states_close(its, gradients, 1e-5)
        assert_states_close(state, values, 1e-5)
        for number, moments in expected["state"].items():
            assert_states_close(found["state"][number], moments, 1e-4)


def test_a_cut_over_data_ranks() -> None:
    """Class centres: ranks with different data have different rows."""

    def rank(world: World) -> None:
        mesh = npuzero.mesh(local_size=2, world=world)
        model = build_seeded_model(make=lambda: nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 8)))
        expected = {name: value.detach().clone() for name, value in model.state_dict().items()}
        for parameter in model[1].parameters():
            cut_parameter(parameter, Cut(("node", "local"), 0))
        npuzero.zero(model, stage=3, mesh=mesh)
        assert_same_bits(full_cut_state(model), expected)
        with npuzero.gathered(model):
            assert torch.equal(model[1].weight, expected["1.weight"][2 * world.rank : 2 * world.rank + 2])

    comm.run_threads(4, rank)


def test_a_size_that_does_not_divide_is_told_on_every_rank() -> None:
    def rank(world: World) -> None:
        mesh = tensor_mesh(world, 4)
        model = build_seeded_model(make=CutWordsModel)
        cut_parameter(model.layers[1].packed, Cut("tensor", 1, (36, 12)))
        cut_parameter(model.layers[1].bias, Cut("tensor", 0, (6, 6)))
        with pytest.raises(ConfigError, match=r"layers\.1\.bias.*tensor.*4 ranks.*: 1, 2, 3, 6"):
            npuzero.zero(model, mesh=mesh)
        with pytest.raises(ConfigError, match=r"layers\.1\.bias"):
            npuzero.predict(model, "zero3", mesh)

    comm.run_threads(4, rank)


class TestCutConflicts:
    def test_one_parameter_has_one_cut(self) -> None:
        model = CutWordsModel()
        cut_parameter(model.tokens.weight, Cut("tensor", 1))
        cut_parameter(model.head.weight, Cut("tensor", 1))
        with pytest.raises(ConfigError, match="the one that it has"):
            cut_parameter(model.head.weight, Cut("tensor", 0))

    @pytest.mark.parametrize("how", [Cut("tensor", 2), Cut("tensor", 0, (1, 2)), Cut("tenser", 0), Cut("pipe", 0)])
    def test_what_is_no_cut_of_a_parameter(self, how: Cut) -> None:
        with pytest.raises(ConfigError):
            cut_parameter(CutLayer().bias, how)

    def test_ranks_that_cut_differently_are_told(self) -> None:
        def rank(world: World) -> None:
            model = build_seeded_model(make=CutWordsModel)
            cut_parameter(model.layers[0].down.weight, Cut("tensor", world.rank))
            with pytest.raises(ConfigError, match=r"layers\.0\.down\.weight"):
                npuzero.zero(model, mesh=tensor_mesh(world, 2))

        comm.run_threads(2, rank)

    def test_tiles_are_not_cut(self) -> None:
        def rank(world: World) -> None:
            model = nn.Sequential(nn.Linear(8, 8))
            cut_parameter(model[0].weight, Cut("tensor", 0))
            with pytest.raises(ConfigError, match=r"0\.weight, which npuzero\.tiled"):
                npuzero.zero(npuzero.tiled(model, {"0": 2}), mesh=tensor_mesh(world, 2))

        comm.run_threads(2, rank)
