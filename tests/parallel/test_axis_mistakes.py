"""Axes of a mesh that divide nothing, and ranks that share a batch but get different ones."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import npuzero
from npuzero import checkpoint, comm, parallel
from npuzero.comm import Mesh, World
from npuzero.errors import ConfigError, StateError
from npuzero.plan import DATA
from npuzero.shard.gradients.input_digests import MOST_ELEMENTS
from world.conftest import one_thread_per_rank  # noqa: F401
from world.toy import build_seeded_model
from world.train import assert_same_bits

WORDS = {"*.up": "colwise", "*.down": "rowwise"}


class NormMlpBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(8), nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x))))


def build_two_blocks() -> nn.Module:
    return build_seeded_model(make=lambda: nn.Sequential(NormMlpBlock(), NormMlpBlock()))


def divide_two_blocks(mesh: Mesh) -> nn.Module:
    return parallel.tensor(build_two_blocks(), mesh, plan=WORDS)


def check_all_ranks_refuse(size: int, body: Callable[[World], Any], match: str) -> None:
    """Check that ``body`` raises a ConfigError with this text on every rank, within seconds."""

    def rank(world: World) -> str:
        with pytest.raises(ConfigError, match=match) as caught:
            body(world)
        return str(caught.value)

    assert len(set(comm.run_threads(size, rank, timeout_s=20))) == 1


# -- axes that nothing uses --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [2, 4])
def test_a_tensor_axis_without_divided_layers(size: int) -> None:
    check_all_ranks_refuse(
        size,
        lambda world: npuzero.zero(build_two_blocks(), mesh=npuzero.mesh(tensor=2, world=world)),
        "axis tensor: .*relate",
    )


def test_a_copy_of_a_divided_model_has_no_cuts() -> None:
    def body(world: World) -> None:
        mesh = npuzero.mesh(tensor=2, world=world)
        model = parallel.relate(linear := nn.Linear(8, 8), tensor="cut") or copy.deepcopy(linear)
        npuzero.zero(model, mesh=mesh)

    check_all_ranks_refuse(2, body, "axis tensor")


def test_repeated_layers_that_are_meant() -> None:
    def rank(world: World) -> None:
        model = build_two_blocks()
        parallel.relate(model, tensor="repeated")
        npuzero.zero(model, mesh=npuzero.mesh(tensor=2, world=world))

    comm.run_threads(2, rank)


@pytest.mark.parametrize("tensor", [1, 2])
def test_a_whole_model_on_every_stage(tensor: int) -> None:
    def body(world: World) -> None:
        mesh = npuzero.mesh(pipe=2, tensor=tensor, world=world)
        npuzero.zero(build_two_blocks() if tensor == 1 else divide_two_blocks(mesh), mesh=mesh)

    check_all_ranks_refuse(2 * tensor, body, "axis pipe: .*0.norm.weight in each of the stages 0, 1.*npuzero.pipeline")


def test_a_pipeline_over_a_tensor_axis_that_no_stage_uses() -> None:
    def body(world: World) -> None:
        mesh = npuzero.mesh(pipe=2, tensor=2, world=world)
        npuzero.pipeline(build_two_blocks(), mesh, 2, micro_batches=2, loss_fn=F.mse_loss)

    check_all_ranks_refuse(4, body, "axis tensor")


def test_one_stage_may_use_the_tensor_axis_alone() -> None:
    """The first stage is an embedding, which both tensor ranks have unsharded."""

    def rank(world: World) -> float:
        mesh = npuzero.mesh(pipe=2, tensor=2, world=world)
        model = build_seeded_model(make=lambda: nn.Sequential(nn.Linear(8, 8), NormMlpBlock()))
        parallel.tensor(model, mesh, plan={"1.up": "colwise", "1.down": "rowwise"})
        pipe = npuzero.pipeline(model, mesh, 2, micro_batches=2, loss_fn=F.mse_loss)
        return pipe.step(torch.ones(4, 8), target=torch.zeros(4, 8)).item()

    assert len(set(comm.run_threads(4, rank))) == 1


@pytest.mark.parametrize("given", ["nothing", "world"])
def test_the_mesh_that_layers_were_divided_over_is_taken(given: str) -> None:
    def rank(world: World) -> dict[str, Tensor]:
        model = divide_two_blocks(npuzero.mesh(tensor=2, world=world))
        npuzero.zero(model, stage=2, **({"world": world} if given == "world" else {}))
        x = torch.randn(4, 8, generator=torch.Generator().manual_seed(1))
        optimizer = npuzero.AdamW(model.parameters(), lr=1e-2)
        model(x).square().mean().backward()
        optimizer.step()
        return npuzero.full_state_dict(model, rank0_only=False)

    plain = build_two_blocks()
    optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-2)
    plain(torch.randn(4, 8, generator=torch.Generator().manual_seed(1))).square().mean().backward()
    optimizer.step()
    for state in comm.run_threads(2, rank):
        torch.testing.assert_close(state, dict(plain.state_dict()), rtol=1e-5, atol=1e-6)


def test_another_mesh_than_layers_were_divided_over() -> None:
    def body(world: World) -> None:
        model = divide_two_blocks(npuzero.mesh(tensor=2, world=world))
        npuzero.zero(model, mesh=npuzero.mesh(world=world))

    check_all_ranks_refuse(2, body, "divided over: Mesh.*tensor=2")


def test_layers_of_ones_own_without_a_mesh() -> None:
    def body(world: World) -> None:
        model = build_two_blocks()
        parallel.relate(model[0].up, tensor="cut")
        npuzero.zero(model, world=world)

    check_all_ranks_refuse(2, body, r"parameter 0.up.weight is cut along its axis 'tensor'")


class LinearAdapter(nn.Module):
    """Replace a Linear, as PEFT's layers do."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.base_layer = linear
        self.a, self.b = nn.Linear(linear.in_features, 2), nn.Linear(2, linear.out_features)

    def forward(self, x: Tensor) -> Tensor:
        return self.base_layer(x) + self.b(self.a(x))


@pytest.mark.parametrize("order", ["before", "within", "after"])
def test_adapters_in_divided_layers(order: str) -> None:
    """Their matrices would be unsharded on each rank, next to a sharded layer."""

    def body(world: World) -> None:
        mesh, model = npuzero.mesh(tensor=2, world=world), build_two_blocks()
        if order == "after":
            parallel.tensor(model, mesh, plan=WORDS)
        model[0].up = LinearAdapter(model[0].up)
        if order == "after":
            npuzero.zero(model, mesh=mesh)
        words = {"*.up": "colwise", "0.up.base_layer": "colwise"} if order == "within" else WORDS
        parallel.tensor(model, mesh, plan={**words, "0.up": "replicate"} if order == "within" else words)

    check_all_ranks_refuse(2, body, "0.up.a.weight" if order == "after" else "0.up: .*Adapter")


# -- batches -----------------------------------------------------------------------------------------------------------


def batch_by_rank(world: World, step: int) -> Tensor:
    return torch.randn(4, 8, generator=torch.Generator().manual_seed(10 * step + world.rank))


@pytest.mark.parametrize(("size", "stage"), [(2, 3), (4, 1)])
def test_tensor_ranks_with_different_batches(size: int, stage: int) -> None:
    def body(world: World) -> None:
        mesh = npuzero.mesh(tensor=2, world=world)
        model = npuzero.zero(divide_two_blocks(mesh), stage=stage, mesh=mesh)
        optimizer = npuzero.AdamW(model.parameters(), lr=1e-2)
        model(batch_by_rank(world, 0)).square().mean().backward()
        optimizer.step()

    check_all_ranks_refuse(size, body, r"along tensor: .*on ranks 0, 1.*on rank 1 .*mesh.index\(npuzero.plan.DATA\)")


def test_batches_the_other_way_round_in_another_group() -> None:
    """The batches of the two groups have equal sums."""

    def body(world: World) -> None:
        mesh = npuzero.mesh(tensor=2, world=world)
        model = npuzero.zero(divide_two_blocks(mesh), mesh=mesh)
        optimizer = npuzero.AdamW(model.parameters(), lr=1e-2)
        model(torch.full((4, 8), float(world.rank in {0, 3}))).square().mean().backward()
        optimizer.step()

    check_all_ranks_refuse(4, body, "along tensor")


@pytest.mark.parametrize("pipe", [2, 4])
@pytest.mark.parametrize("what", ["inputs", "target"])
def test_stages_with_different_batches(what: str, pipe: int) -> None:
    def body(world: World) -> None:
        mesh = npuzero.mesh(pipe=2, world=world)
        model = npuzero.pipeline(build_two_blocks(), mesh, 2, micro_batches=2, loss_fn=F.mse_loss)
        x = torch.ones(4, 8)
        own = batch_by_rank(world, 0)
        model.step(own if what == "inputs" else x, target=own if what == "target" else x)

    check_all_ranks_refuse(pipe, body, "along pipe and tensor")


def test_training_goes_on_after_the_error_as_if_it_had_not_been() -> None:
    def rank(world: World, spoil: bool) -> dict[str, Tensor]:
        mesh = npuzero.mesh(tensor=2, world=world)
        model = npuzero.zero(divide_two_blocks(mesh), stage=3, mesh=mesh)
        optimizer = npuzero.AdamW(model.parameters(), lr=1e-2)
        for step in range(3):
            if step == 1 and spoil:
                model(batch_by_rank(world, 0)).square().mean().backward()
                with pytest.raises(ConfigError, match="along tensor"):
                    optimizer.step()
                optimizer.zero_grad()
            x = torch.randn(4, 8, generator=torch.Generator().manual_seed(10 * step + mesh.index(DATA)))
            model(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        return npuzero.full_state_dict(model, rank0_only=False)

    good, mended = (comm.run_threads(4, partial(rank, spoil=spoil)) for spoil in (False, True))
    for a, b in zip(good, mended, strict=True):
        assert_same_bits(a, b)


class TakesAnything(nn.Module):
    """Take any arguments in addition to ``x``."""

    def __init__(self) -> None:
        super().__init__()
        self.block = NormMlpBlock()

    def forward(self, x: Tensor, *_: Any, **__: Any) -> Tensor:
        return self.block(x)


def differing_batches(kind: str, which: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return two batches of a kind that differ or, for ``which`` 0, the same batch twice."""
    many = MOST_ELEMENTS * 2 + 3
    base = torch.arange(many)
    made: dict[str, Any] = {
        "keyword": torch.tensor([which]),
        "tokens": torch.tensor([1, 2, 3 + which]),
        "order": torch.tensor([[1, 2], [3, 4]] if which else [[3, 4], [1, 2]]),
        "shape": torch.zeros(2, 3 + which, 0),
        "bfloat16": torch.tensor([1.0 + which], dtype=torch.bfloat16),
        "bool": torch.tensor([True, bool(which)]),
        "complex": torch.tensor([1j * which], dtype=torch.complex128),
        "large": base.roll(which),
        "strided": base.roll(which)[:-1].view(2, -1).T,
        "nested": {"a": [torch.ones(2), (torch.tensor(float(which)), None)], "b": "text"},
    }
    return ((), {"more": made[kind]}) if kind == "keyword" else ((made[kind],), {})


KINDS = ["keyword", "tokens", "order", "shape", "bfloat16", "bool", "complex", "large", "strided", "nested"]


@pytest.mark.parametrize("kind", KINDS)
def test_whatever_inputs_are(kind: str) -> None:
    def rank(world: World) -> list[bool]:
        mesh = npuzero.mesh(tensor=2, world=world)
        model = npuzero.zero(
            parallel.tensor(build_seeded_model(make=TakesAnything), mesh, plan=WORDS), stage=2, mesh=mesh
        )
        optimizer = npuzero.AdamW(model.parameters(), lr=1e-2)
        told = []
        for which in (0, world.rank, 0):
            args, options = differing_batches(kind, which)
            model(torch.ones(2, 8), *args, **options).square().mean().backward()
            try:
                optimizer.step()
                told.append(False)
            except ConfigError:
                told.append(True)
            optimizer.zero_grad()
        return told

    assert comm.run_threads(2, rank) == [[False, True, False]] * 2


class GatherSlices(nn.Module):
    """Take a rank's own tokens and gather all of them: the weights see a part on each rank."""

    def __init__(self, group: comm.Communicator) -> None:
        super().__init__()
        self.scale, self.group = nn.Parameter(torch.ones(8)), group
        parallel.relate(self.scale, tensor="summed")

    def forward(self, x: Tensor) -> Tensor:
        return parallel.functions.all_gather_dim(x * self.scale, self.group, 0)


def test_a_program_may_divide_the_tokens_itself() -> None:
    def rank(world: World) -> Tensor:
        mesh = npuzero.mesh(tensor=2, world=world)
        model = npuzero.zero(GatherSlices(mesh.communicator(("tensor",), "own")), stage=2, mesh=mesh)
        optimizer = npuzero.AdamW(model.parameters(), lr=1e-2)
        model(batch_by_rank(world, 0)).square().mean().backward()
        optimizer.step()
        return npuzero.full_state_dict(model, rank0_only=False)["scale"]

    first, second = comm.run_threads(2, rank)
    assert torch.equal(first, second)


# -- saves -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("way", ["save", "export", "full_state_dict"])
@pytest.mark.parametrize("stage", [1, 3])
def test_ranks_that_have_drifted_apart_are_told_as_they_save(way: str, stage: int, tmp_path: Path) -> None:
    """Random numbers drawn in a forward differ, which no comparison of batches detects."""

    def rank(world: World) -> None:
        mesh = npuzero.mesh(tensor=2, world=world)
        model = npuzero.zero(divide_two_blocks(mesh), stage=stage, mesh=mesh)
        optimizer = npuzero.AdamW(model.parameters(), lr=1e-2)
        ways = {
            "save": lambda: checkpoint.save(tmp_path, model, optimizer, step=1),
            "export": lambda: npuzero.export(model, tmp_path / "weights"),
            "full_state_dict": lambda: npuzero.full_state_dict(model),
        }
        ways[way]()
        noise = torch.randn(4, 8, generator=torch.Generator().manual_seed(world.rank))
        (model(torch.ones(4, 8)) + noise).square().mean().backward()
        optimizer.step()
        with pytest.raises(StateError, match=r"parameter 0.* on rank 1 than on rank 0"):
            ways[way]()

    comm.run_threads(2, rank)
