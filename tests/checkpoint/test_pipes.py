"""Checkpoints and state dicts of pipelines: each stage has some blocks of a model, saved and loaded on any mesh."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import npuzero
from npuzero import checkpoint, comm
from npuzero.comm import World
from npuzero.plan import Cut, Relation
from npuzero.shard.layout.axis_relations import relate_parameter
from npuzero.shard.layout.tensor_slices import cut_parameter
from world.toy import build_seeded_model
from world.train import assert_same_bits

#: Sizes of pipe, data and tensor, chunks per rank, and the plan.
Where = tuple[int, int, int, int, str]
State = dict[str, Tensor]

BLOCKS, DIM = 4, 8


class PipedBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(DIM, 3 * DIM)
        self.norm = nn.LayerNorm(DIM)
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self) -> Tensor:
        self.calls += 1
        return sum(parameter.square().sum() for parameter in self.parameters())


class PipedModel(nn.Module):
    """Tied embedding and head around blocks, and a buffer that every stage has."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        self.register_buffer("angles", torch.arange(5.0) + seed)
        self.embed = nn.Embedding(11, DIM)
        self.layers = nn.ModuleDict({str(i): PipedBlock() for i in range(BLOCKS)})
        self.head = nn.Linear(DIM, 11, bias=False)
        self.head.weight = self.embed.weight
        self.share = 1.0  # the tied parameter's share of the loss

    def forward(self) -> Tensor:
        """Return the sum of squares: the same bits on all ranks, and on one rank."""
        own = self.share * self.embed.weight.square().sum() if hasattr(self, "embed") else 0.0
        return sum((block() for block in self.layers.values()), own)


#: Names in order.
MODEL = tuple(PipedModel().state_dict())


def build_pipe_stage(mesh: Any, chunks: int, seed: int) -> nn.Module:
    model, here, pipe = build_seeded_model(seed, lambda: PipedModel(seed)), mesh.index(("pipe",)), mesh.size(("pipe",))
    for i in range(BLOCKS):
        if i * pipe * chunks // BLOCKS % pipe != here:
            del model.layers[str(i)]
        elif mesh.size(("tensor",)) > 1:
            cut_parameter(model.layers[str(i)].up.weight, Cut("tensor", 0))
    if here < pipe - 1:
        del model.head
    if 0 < here < pipe - 1:
        del model.embed
    elif pipe > 1:
        model.share = 0.5
        relate_parameter(model.embed.weight, "pipe", Relation.SUMMED)
    return model


def build_on_pipe(world: World, where: Where, seed: int = 9) -> tuple[Any, Any]:
    pipe, data, tensor, chunks, plan = where
    mesh = npuzero.mesh(pipe=pipe, tensor=tensor, local_size=data, world=world)
    model = npuzero.zero(build_pipe_stage(mesh, chunks, seed), plan=plan, mesh=mesh)
    return model, npuzero.AdamW(model.parameters(), lr=0.01, weight_decay=0.1)


def train_piped_model(model: Any, optimizer: Any, count: int = 3) -> None:
    for _ in range(count):
        model().backward()
        optimizer.step()
        optimizer.zero_grad()


def full_piped_state(model: Any) -> State:
    return npuzero.full_state_dict(model, rank0_only=False)


def piped_training_state(model: Any, optimizer: Any) -> State:
    """Return the full model, and this stage's optimizer states, by name."""
    names = [name for name, _ in model.named_parameters()]
    states = optimizer.state_dict()["state"].items()
    return full_piped_state(model) | {f"{names[i]}.{kind}": value for i, its in states for kind, value in its.items()}


def check_piped_states(states: list[State], expected: State) -> None:
    """Every rank has the full model in order; the ranks together have all optimizer states, bit for bit."""
    assert set().union(*states) == expected.keys()
    for state in states:
        assert [name for name in state if name in MODEL] == list(MODEL)
        assert_same_bits(state, {name: expected[name] for name in state})


def count_pipe_ranks(where: Where) -> int:
    return where[0] * where[1] * where[2]


ONE: Where = (1, 1, 1, 1, "zero1")
WHERES: list[Where] = [(2, 1, 1, 1, "zero2"), (4, 1, 1, 1, "zero1"), (2, 1, 1, 2, "zero3"), (2, 2, 1, 1, "zero3")]
BIG: Where = (2, 2, 2, 1, "zero3")


def save_from_pipe(where: Where, folder: Path, asynchronous: bool = False) -> list[State]:
    """Train three steps and save; return the saved states by rank."""

    def rank(world: World) -> State:
        model, optimizer = build_on_pipe(world, where, seed=0)
        train_piped_model(model, optimizer)
        saving = checkpoint.save(folder, model, optimizer, step=3, extra=7, asynchronous=asynchronous)
        state = piped_training_state(model, optimizer)
        if asynchronous:
            train_piped_model(model, optimizer, 1)
        saving.wait()
        return state

    return comm.run_threads(count_pipe_ranks(where), rank)


def load_on_pipe(where: Where, folder: Path, again: Path | None = None) -> list[State]:
    """Return the loaded states by rank; save them ``again``."""

    def rank(world: World) -> State:
        model, optimizer = build_on_pipe(world, where)
        found = checkpoint.load(folder, model, optimizer)
        assert (found.step, found.extra) == (3, 7)
        if again is not None:
            checkpoint.save(again, model, optimizer, step=3, extra=7)
        return piped_training_state(model, optimizer)

    return comm.run_threads(count_pipe_ranks(where), rank)


@pytest.mark.parametrize("where", [*WHERES, pytest.param(BIG, marks=pytest.mark.slow)])
def test_any_mesh_loads_what_stages_saved_and_back(where: Where, tmp_path: Path) -> None:
    (expected,) = save_from_pipe(ONE, tmp_path / "one")
    check_piped_states(save_from_pipe(where, tmp_path / "stages", asynchronous=True), expected)
    checkpoint.verify(tmp_path / "stages")
    for folder, there in (("stages", ONE), ("one", where), ("stages", (2, 1, 1, 2, "zero1"))):
        check_piped_states(load_on_pipe(there, tmp_path / folder), expected)


@pytest.mark.slow
@pytest.mark.parametrize("there", [(1, 8, 1, 1, "zero3"), (1, 4, 2, 1, "zero2"), (4, 2, 1, 1, "zero1"), ONE])
def test_eight_ranks_on_any_axes_load_what_two_by_two_by_two_saved(there: Where, tmp_path: Path) -> None:
    expected = merge_rank_states(save_from_pipe(BIG, tmp_path / "big"))
    assert_same_bits(merge_rank_states(load_on_pipe(there, tmp_path / "big", again=tmp_path / "there")), expected)
    assert_same_bits(merge_rank_states(load_on_pipe(BIG, tmp_path / "there")), expected)


def merge_rank_states(states: list[State]) -> State:
    """Return the ranks' states together, without the tensors that tensor ranks divide."""
    return {name: value for state in states for name, value in state.items() if "up.weight." not in name}


def test_a_whole_state_dict_goes_into_stages() -> None:
    state = build_seeded_model(0, PipedModel).state_dict()

    def rank(world: World) -> None:
        model, _ = build_on_pipe(world, (2, 2, 1, 2, "zero3"))
        npuzero.load_full_state_dict(
            model, state if world.rank == 0 else {n: v.clone().zero_() for n, v in state.items()}
        )
        found = npuzero.full_state_dict(model)
        assert bool(found) == (world.rank == 0)
        if found:
            assert_same_bits(found, state)
        for wrong in ({**state, "layers.9.x": state["angles"]}, {n: v for n, v in state.items() if n != "head.weight"}):
            with pytest.raises(npuzero.CheckpointError):
                npuzero.load_full_state_dict(model, wrong)

    comm.run_threads(4, rank)


def test_a_stage_that_cannot_write_tells_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_from_pipe((2, 1, 1, 1, "zero2"), tmp_path)

    def rank(world: World) -> None:
        model, optimizer = build_on_pipe(world, (2, 1, 1, 1, "zero2"))

        class Scheduler:
            def state_dict(self) -> dict[str, int]:
                if world.rank == 1:
                    raise OSError("no room")
                return {}

            def load_state_dict(self, state: Any) -> None: ...

        with pytest.raises(npuzero.CheckpointError, match="rank 1: OSError: no room"):
            checkpoint.save(tmp_path, model, optimizer, step=4, scheduler=Scheduler())

    comm.run_threads(2, rank)
    assert checkpoint.latest(tmp_path) == tmp_path / "step-00000003"


@pytest.mark.parametrize("chunks", [1, 2])
def test_stages_export_one_file_and_begin_with_it(chunks: int, tmp_path: Path) -> None:
    expected, path = build_seeded_model(0, PipedModel).state_dict(), tmp_path / "model.safetensors"
    where: Where = (2, 2, 1, chunks, "zero3")
    comm.run_threads(4, lambda world: npuzero.export(build_on_pipe(world, where, seed=0)[0], path))
    found = load_file(path)
    assert_same_bits(found, {name: expected[name] for name in expected if name != "head.weight"})

    def rank(world: World, name: Path) -> State:
        mesh = npuzero.mesh(pipe=2, local_size=2, world=world)
        return full_piped_state(npuzero.zero(build_pipe_stage(mesh, chunks, 9), plan="zero3", mesh=mesh, weights=name))

    for state in comm.run_threads(4, lambda world: rank(world, path)):
        assert_same_bits(state, expected)
    save_file({**found, "stranger": torch.ones(2)}, tmp_path / "more.safetensors")
    with pytest.raises(npuzero.CheckpointError, match="stranger"):
        comm.run_threads(4, lambda world: rank(world, tmp_path / "more.safetensors"))
