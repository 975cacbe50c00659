"""Thin wires at their edges: values that rounding could lose or spread, and traces of a lost block."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import npuzero
from npuzero import Plan, Precision, comm
from npuzero.comm import World
from npuzero.plan import THINNED, MeshShape
from world.thin import MatrixChain, ThinOracle, chain_batch, chain_loss, is_matrix
from world.toy import build_seeded_model

MESHES = ((2, 2), (2, 4), (3, 2), (4, 2))
FP32 = torch.float32


def build_thin_chain(world: World, row: str, precision: Precision) -> nn.Module:
    plan = Plan.preset(row, precision=precision, local_size=2)
    return npuzero.zero(build_seeded_model(0, MatrixChain), plan=plan, world=world, units=is_matrix)


# -- values ------------------------------------------------------------------------------------------------------------


class GivenGradient(nn.Module):
    """One parameter with the given gradient."""

    def __init__(self, numel: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(numel))

    def forward(self, gradient: Tensor) -> Tensor:
        return (self.weight * gradient).sum()


def odd_values(rank: int) -> Tensor:
    """Blocks of 128 elements, of kinds that are next to each other; padding cuts the last one."""
    generator = torch.Generator().manual_seed(rank)
    one = torch.randn(128, generator=generator)
    zeros = torch.zeros(128)
    denormal = torch.randint(1, 2**20, (128,), generator=generator, dtype=torch.int32).view(FP32)
    blocks = [one * 1e30, one * 1e-30, one, zeros, -zeros, denormal, one * 2.0**-119, one * 1e30, one]
    return torch.cat([*blocks * 5, (one * 1e-30)[:37]])


def reduced_gradients(plan: Plan, mesh: MeshShape, values: list[Tensor]) -> list[Tensor]:
    """Return the gradient by rank; each rank has a part."""

    def rank(world: World) -> Tensor:
        own = replace(plan, local_size=mesh.local)
        model = npuzero.zero(GivenGradient(len(values[0])), plan=own, world=world)
        model(values[world.rank]).backward()
        found = npuzero.full_gradient(model.weight)
        assert found is not None
        return found

    return comm.run_threads(mesh.world, rank)


def int32_patterns(values: Tensor) -> Tensor:
    return values.view(torch.int32)


@pytest.mark.parametrize("sizes", MESHES, ids=str)
@pytest.mark.parametrize("row", [*THINNED, "zero1", "zero3"])
def test_values_of_all_magnitudes_have_the_oracles_bits(row: str, sizes: tuple[int, int]) -> None:
    precision = Precision(FP32) if row in THINNED else Precision(FP32, gathers="int8", wires="int4")
    plan, mesh = Plan.preset(row, precision=precision), MeshShape(*sizes)
    values = [odd_values(rank) for rank in range(mesh.world)]
    expected = ThinOracle(plan, mesh).reduced(values)
    by_block = expected[:1152].view(9, 128)
    assert by_block[:3].any(1).all() and by_block[6].any() and not by_block[3:6].any()
    assert 0 < by_block[1].abs().max() < 1e-29 < 1e29 < by_block[0].abs().max(), "neighbours are apart"
    assert expected[-37:].any()
    for found in reduced_gradients(plan, mesh, values):
        assert torch.equal(int32_patterns(found), int32_patterns(expected))


@pytest.mark.parametrize("payload", [0x7F800000, -0x00800000, 0x7F800001, -0x00000001, 0x7FC12345])
@pytest.mark.parametrize("sizes", MESHES, ids=str)
@pytest.mark.parametrize("preset", THINNED)
def test_what_is_not_finite_is_lost_in_its_block_alone(preset: str, sizes: tuple[int, int], payload: int) -> None:
    """Infinities and NaNs, signalling ones included, of one rank: also in the block that the padding cuts."""
    plan, mesh = Plan.preset(preset, precision=Precision(FP32)), MeshShape(*sizes)
    values = [odd_values(rank) for rank in range(mesh.world)]
    oracle = ThinOracle(plan, mesh)
    expected = oracle.reduced(values)
    blocks = [2 * 128 + 5, len(expected) - 1]
    int32_patterns(values[-1])[blocks] = payload
    lost = torch.zeros(len(expected), dtype=torch.bool)
    for at in blocks:
        lost[at // 128 * 128 : at // 128 * 128 + 128] = True
    for found in reduced_gradients(plan, mesh, values):
        assert found[lost].isnan().all()
        assert torch.equal(int32_patterns(found[~lost]), int32_patterns(expected[~lost]))


@pytest.mark.parametrize("wires", ["int4", {"pod": "int4"}], ids=str)
@pytest.mark.parametrize("row", ["zero1", "hsdp", "hpz"])
def test_pods_are_levels_too(row: str, wires: Any) -> None:
    plan, shape = Plan.preset(row, precision=Precision(FP32, wires=wires)), MeshShape(2, 2, pod=2)
    values = [odd_values(rank) for rank in range(shape.world)]
    expected = ThinOracle(plan, shape).reduced(values)

    def rank(world: World) -> Tensor:
        mesh = npuzero.mesh(pod=2, local_size=2, world=world)
        model = npuzero.zero(GivenGradient(len(values[0])), plan=replace(plan, local_size=None), mesh=mesh)
        model(values[world.rank]).backward()
        found = npuzero.full_gradient(model.weight)
        assert found is not None
        return found

    for found in comm.run_threads(shape.world, rank):
        assert torch.equal(int32_patterns(found), int32_patterns(expected))


# -- what stays from step to step --------------------------------------------------------------------------------------


def put_infinity(gradient: Tensor) -> Tensor:
    """One infinity, in the block that ends behind the parameter."""
    return gradient.view(-1).index_fill(0, torch.tensor([gradient.numel() - 1]), torch.inf).view_as(gradient)


@pytest.mark.parametrize("micro_batches", [1, 2])
@pytest.mark.parametrize("parameters", [FP32, torch.float16], ids=str)
@pytest.mark.parametrize("row", ["zero0", "zero1", "zero1.5", "zero2", "zero3", "hsdp", "hpz"])
def test_a_block_that_was_lost_is_forgotten(row: str, parameters: torch.dtype, micro_batches: int) -> None:
    """The scale decreases once, although the padding after the parameter was lost as well."""

    def rank(world: World) -> list[float]:
        model = build_thin_chain(world, row, Precision(parameters, wires="int4", feedback="all"))
        optimizer = npuzero.AdamW(model.parameters(), lr=1e-2)
        scaler = npuzero.LossScaler(init_scale=8.0)
        scales = []
        for step in range(4):
            for micro_batch in range(micro_batches):
                bad = step == 1 and world.rank == 2
                handle = model.layers[1].weight.register_hook(put_infinity) if bad else None
                scaler.scale(chain_loss(model, chain_batch(step, micro_batch, world.rank))).backward()
                if handle is not None:
                    handle.remove()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            scales.append(scaler.get_scale())
        npuzero.full_state_dict(model, rank0_only=False)
        return scales

    for scales in comm.run_threads(4, rank):
        assert scales == [8.0, 4.0, 4.0, 4.0]


@pytest.mark.parametrize("row", ["zero0", "zero1", "zero3", "hpz"])
def test_a_norm_has_nothing_of_gradients_that_no_rank_has(row: str) -> None:
    """A parameter's rounding error returns in a step that does not use it: norms must not count it."""

    class Sometimes(MatrixChain):
        short = False

        def forward(self, x: Tensor) -> Tensor:
            for layer in self.layers[: 1 if self.short else 3]:
                x = layer(x, self.seen)
            return x

    def rank(world: World) -> list[tuple[float, float, int]]:
        plan = Plan.preset(row, precision=Precision(torch.bfloat16, wires="int4", feedback="all"), local_size=2)
        model = npuzero.zero(build_seeded_model(0, Sometimes), plan=plan, world=world, units=is_matrix)
        optimizer = npuzero.AdamW(model.parameters(), lr=1e-2)
        found = []
        for step in range(2):
            model.short = step == 1
            chain_loss(model, chain_batch(step, 0, world.rank)).backward()
            norm = npuzero.clip_grad_norm_(model, 1e9).item()
            gradients = [g for p in model.parameters() if (g := npuzero.full_gradient(p)) is not None]
            wanted = sum(g.double().square().sum() for g in gradients) ** 0.5
            found.append((norm, float(wanted), len(gradients)))
            optimizer.step()
            optimizer.zero_grad()
        npuzero.full_state_dict(model, rank0_only=False)
        return found

    for found in comm.run_threads(4, rank):
        assert [count for *_, count in found] == [3, 1]
        for norm, wanted, _ in found:
            assert norm == pytest.approx(wanted, rel=1e-6)


@pytest.mark.parametrize("way", ["checkpoint", "state dict"])
def test_feedback_begins_with_zeros_after_a_load(way: str, tmp_path: Path) -> None:
    """Steps after a load equal those after the save, for any training in between."""

    def rank(world: World) -> tuple[list[float], list[float]]:
        model = build_thin_chain(world, "hpz", Precision(FP32, gathers="int8", wires="int4", feedback="all"))
        optimizer = npuzero.ZeroOptimizer(torch.optim.SGD, model.parameters(), lr=1.0)
        before = npuzero.full_state_dict(model, rank0_only=False)
        npuzero.checkpoint.save(tmp_path, model, optimizer, step=0)

        def losses() -> list[float]:
            found = []
            for step in range(3):
                loss = chain_loss(model, chain_batch(step, 0, world.rank))
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                found.append(loss.item())
            return found

        first = losses()
        if way == "checkpoint":
            npuzero.checkpoint.load(tmp_path, model, optimizer)
        else:
            npuzero.load_full_state_dict(model, before)
        return first, losses()

    for first, again in comm.run_threads(4, rank):
        assert first == again
