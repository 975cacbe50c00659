"""Tiled Linears train as Linears do, in the memory of a tile; their checkpoints fit any tiles."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.utils.checkpoint import checkpoint as rerun

import npuzero
from npuzero import Memory, Settings, checkpoint, comm
from npuzero.comm import World

from .toy import TrainingRecipe, build_seeded_model, toy_loss, toy_tokens
from .train import CutSession, State, assert_same_bits, assert_states_close, train_by_recipe, train_plain

#: Of layers with and without a bias, whose 48, 32 and 16 rows most of these do not divide.
TILES = {"blocks.*.qkv": 3, "blocks.*.mlp.1": 5, "blocks.1.out": 7}
RECIPE = TrainingRecipe(steps=3, micro_batches=2, clip=0.5, groups=True)


def build_tiled_toy(tiles: dict[str, int] | None = None, seed: int = 0) -> Any:
    """The toy model with its tiles."""
    return npuzero.tiled(build_seeded_model(seed), TILES if tiles is None else tiles)


# -- training ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("plan", ["zero0", "zero2", "zero3", "hpz"])
def test_it_trains_as_plain_torch(plan: str, ranks: int) -> None:
    def rank(world: World) -> State:
        session = CutSession(build_tiled_toy(), world, plan=plan)
        return train_by_recipe(session, RECIPE) | session.state()

    found = comm.run_threads(ranks, rank)
    for state in found:
        assert_same_bits(state, found[0])
    assert_states_close(found[0], train_plain(build_seeded_model(), ranks, RECIPE))


class RerunBlock(nn.Module):
    """A block whose activations are computed again in backward."""

    def __init__(self, block: nn.Module, reentrant: bool) -> None:
        super().__init__()
        self.block = block
        self.reentrant = reentrant

    def forward(self, x: Tensor) -> Any:
        return rerun(self.block, x, use_reentrant=self.reentrant)


def measure_gathered_peak(model: nn.Module, world: World, **settings: Any) -> int:
    """Return the peak bytes of gathered parameters and communication buffers in a step of zero3."""
    session = CutSession(model, world, stage=3, settings=Settings(**settings))
    train_by_recipe(session, TrainingRecipe(steps=3))
    session.state()
    return npuzero.report(session.model).held[Memory.DEVICE]["buffers"]


@pytest.mark.parametrize("reentrant", [False, True])
def test_activation_checkpointing_gathers_tiles_one_after_another(reentrant: bool) -> None:
    """With the same losses; and no more is unsharded at once than without it."""

    def rank(world: World) -> tuple[State, int, int]:
        wide = {"blocks.*.qkv": 8, "blocks.*.mlp.1": 8, "blocks.*.mlp.3": 8}
        model = build_tiled_toy(wide)
        model.blocks = nn.ModuleList(RerunBlock(block, reentrant) for block in model.blocks)
        session = CutSession(model, world, stage=3, settings=Settings(prefetch=0))
        state = train_by_recipe(session, TrainingRecipe(steps=3)) | session.state()
        most = npuzero.report(session.model).held[Memory.DEVICE]["buffers"]
        return state, most, measure_gathered_peak(build_tiled_toy(wide), world, prefetch=0)

    for state, most, usual in comm.run_threads(2, rank):
        assert_states_close({name.replace(".block.", "."): value for name, value in state.items()}, _train_untiled())
        assert most == usual


def _train_untiled() -> State:
    return train_plain(build_seeded_model(), 2, TrainingRecipe(steps=3))


# -- memory ------------------------------------------------------------------------------------------------------------


def build_wide_linear() -> nn.Module:
    """A model with little more than one Linear of 3840 rows."""
    return nn.Sequential(nn.Linear(16, 3840, bias=False), nn.Linear(3840, 1, bias=False))


def measure_buffer_bytes(tiles: int, ranks: int, **settings: Any) -> int:
    def rank(world: World) -> int:
        model = build_seeded_model(make=build_wide_linear)
        model[1].requires_grad_(False)
        npuzero.tiled(model, {"0": tiles})
        session = CutSession(model, world, units=nn.Linear, stage=3, settings=Settings(**settings))
        optimizer = session.optimizer(torch.optim.AdamW)
        for _ in range(3):
            session.model(torch.ones(1, 16)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        session.state()
        report = npuzero.report(session.model)
        facts = {"settings": Settings(**settings), "units": nn.Linear}
        plain = build_seeded_model(make=build_wide_linear)
        plain[1].requires_grad_(False)
        assert report.held == npuzero.predict(npuzero.tiled(plain, {"0": tiles}), 3, ranks, **facts).held
        return report.held[Memory.DEVICE]["buffers"]

    return comm.run_threads(ranks, rank)[0]


@pytest.mark.parametrize("ranks", [2, 3])
def test_working_memory_falls_by_the_number_of_tiles(ranks: int) -> None:
    """One tile at a time without prefetch; with it, a second one."""
    rest = 3840 * 4  # the other layer's weight
    one = measure_buffer_bytes(1, ranks, prefetch=0, overlap=False) - rest
    for tiles in (4, 10):
        assert measure_buffer_bytes(tiles, ranks, prefetch=0, overlap=False) - rest == one // tiles
        assert measure_buffer_bytes(tiles, ranks) - rest <= 4 * (one // tiles)


SETTINGS = {
    "as usual": Settings(),
    "no overlap": Settings(overlap=False),
    "no prefetch": Settings(prefetch=0),
    "far prefetch": Settings(prefetch=3),
}


@pytest.mark.parametrize("plan", [pytest.param("zero1", marks=pytest.mark.slow), "zero3", "hpz"])
@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
@pytest.mark.parametrize("micro_batches", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_report_equals_predict(plan: str, settings: Settings, micro_batches: int) -> None:
    """Tiles run within blocks, and the blocks' other parameters stay gathered."""
    recipe = TrainingRecipe(steps=3, micro_batches=micro_batches, clip=0.5)

    def rank(world: World) -> npuzero.Report:
        session = CutSession(build_tiled_toy(), world, plan=plan, local_size=2, settings=settings)
        train_by_recipe(session, recipe)
        session.state()
        return npuzero.report(session.model)

    facts = {"micro_batches": recipe.micro_batches, "clip": recipe.clip is not None}
    expected = npuzero.predict(build_tiled_toy(), plan, 4, local_size=2, settings=settings, **facts)
    for report in comm.run_threads(4, rank):
        assert report.held == expected.held and report.bytes_sent == expected.bytes_sent


# -- one weight, whatever the tiles ------------------------------------------------------------------------------------


class TiledRun:
    """Train a few steps, to be saved and resumed."""

    def __init__(self, world: World, tiles: dict[str, int], seed: int = 0, plan: str = "zero3") -> None:
        self.world = world
        model = npuzero.tiled(build_seeded_model(seed), tiles) if tiles else build_seeded_model(seed)
        self.model: Any = npuzero.zero(model, plan=plan, world=world)
        self.optimizer = npuzero.AdamW(self.model.parameters(), lr=1e-2, eps=1e-3)

    def steps(self, count: int) -> None:
        for step in range(count):
            toy_loss(self.model, toy_tokens(step, 0, 0)).backward()  # the same on every rank: of any number of them
            self.optimizer.step()
            self.optimizer.zero_grad()


def read_whole_checkpoint(path: Path | None, file: Path) -> State:
    """All tensors of a checkpoint, as torch reads them."""
    dcp_to_torch_save(path, file)
    content = torch.load(file, weights_only=True)
    found = {f"model.{name}": value for name, value in content["model"].items()}
    for name, values in content["optim"]["state"].items():
        found |= {f"optim.{name}.{key}": value for key, value in values.items()}
    return found


OTHER = {"blocks.*.qkv": 4, "blocks.2.mlp.1": 32}


@pytest.mark.filterwarnings("ignore::UserWarning:torch.*")
@pytest.mark.parametrize(("first", "second"), [(TILES, {}), ({}, TILES), (TILES, OTHER)], ids=["out", "in", "other"])
def test_a_checkpoint_fits_any_tiles_and_ranks(first: dict[str, int], second: dict[str, int], tmp_path: Path) -> None:
    """Saved by two ranks, loaded by three and saved again: the same names, the same bits; and training goes on."""

    def save(world: World) -> State:
        run = TiledRun(world, first)
        run.steps(2)
        checkpoint.save(tmp_path / "a", run.model, run.optimizer, step=2)
        run.steps(2)
        return npuzero.full_state_dict(run.model, rank0_only=False)

    def load(world: World) -> State:
        run = TiledRun(world, second, seed=1, plan="zero1")
        assert checkpoint.load(tmp_path / "a", run.model, run.optimizer).step == 2
        checkpoint.save(tmp_path / "b", run.model, run.optimizer, step=2)
        run.steps(2)
        return npuzero.full_state_dict(run.model, rank0_only=False)

    expected, found = comm.run_threads(2, save)[0], comm.run_threads(3, load)[0]
    assert_states_close(found, expected)
    a, b = (read_whole_checkpoint(checkpoint.latest(tmp_path / name), tmp_path / f"{name}.pt") for name in "ab")
    assert_same_bits(b, a)
    assert {
        name.removeprefix("model.") for name in a if name.startswith("model.")
    } == build_seeded_model().state_dict().keys()
    assert "optim.blocks.0.qkv.weight.exp_avg" in a and float(a["optim.blocks.0.qkv.weight.step"]) == 2


@pytest.mark.filterwarnings("ignore::UserWarning:torch.*")
def test_torchs_own_checkpoint_has_one_weight(tmp_path: Path) -> None:
    def rank(world: World) -> None:
        first, second = TiledRun(world, TILES), TiledRun(world, TILES, seed=1)
        first.steps(2)
        state = checkpoint.state_dict(first.model, first.optimizer)
        assert state["model"]["blocks.0.qkv.weight"].shape == (48, 16)
        assert "blocks.0.qkv.weight" in state["optim"]["param_groups"][0]["params"]
        checkpoint.load_state_dict(second.model, second.optimizer, state=state)
        for run in (first, second):
            run.steps(2)
        states = [npuzero.full_state_dict(run.model, rank0_only=False) for run in (first, second)]
        assert_same_bits(states[1], states[0])
        alone = TiledRun(world, TILES).model
        empty = checkpoint.state_dict(alone, npuzero.AdamW(alone.parameters()))
        assert empty["optim"]["state"]["blocks.0.qkv.weight"]["exp_avg"].shape == (48, 16)

    comm.run_threads(2, rank)


def test_whole_state_dicts_go_in_and_out() -> None:
    def rank(world: World) -> None:
        first, second = build_tiled_toy(), build_tiled_toy(OTHER, seed=1)
        expected = build_seeded_model().state_dict()
        for model in (first, second):
            npuzero.zero(model, stage=3, world=world)
        state = npuzero.full_state_dict(first, rank0_only=False)
        assert_same_bits(state, expected)
        npuzero.load_full_state_dict(second, state)
        assert_same_bits(npuzero.full_state_dict(second, rank0_only=False), expected)

    comm.run_threads(3, rank)


@pytest.mark.parametrize("dtype", [None, "fp32"])
def test_exported_files_fit_any_tiles(dtype: str | None, tmp_path: Path) -> None:
    def export(world: World) -> State:
        model = npuzero.zero(build_tiled_toy(), stage=3, precision="bf16", world=world)
        npuzero.export(model, tmp_path, dtype=dtype)
        return npuzero.full_state_dict(model, rank0_only=False)

    def read(tiles: dict[str, int], world: World) -> State:
        with torch.device("meta"):
            model = build_seeded_model()
        if tiles:
            npuzero.tiled(model, tiles)
        npuzero.zero(model, stage=3, precision="bf16", weights=tmp_path, world=world)
        return npuzero.full_state_dict(model, rank0_only=False)

    expected = comm.run_threads(2, export)[0]
    for tiles in ({}, TILES, OTHER):
        assert_same_bits(comm.run_threads(3, partial(read, tiles))[0], expected)


def test_tiles_on_meta_are_initialised_as_linears_of_their_rows() -> None:
    def fill(module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            nn.init.constant_(module.weight, 0.5)

    def rank(world: World) -> tuple[State, State]:
        models = []
        for initialize in (None, fill):
            with torch.device("meta"):
                model = nn.Sequential(nn.Linear(16, 37, bias=False))
            models.append(npuzero.tiled(model, {"0": 5}))
            npuzero.zero(model, stage=3, initialize=initialize, world=world)
        usual, filled = (npuzero.full_state_dict(model, rank0_only=False) for model in models)
        return usual, filled

    for usual, filled in comm.run_threads(2, rank):
        assert (filled["0.weight"] == 0.5).all()
        assert 0.2 < usual["0.weight"].abs().max() <= 0.25, "1 / sqrt(in_features), as of the whole"
