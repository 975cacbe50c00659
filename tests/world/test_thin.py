"""Thin wires: parameters all-gathered in 8 bits, gradients reduced in few, compared with an oracle in plain torch."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

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


class ThinStep(NamedTuple):
    """The records of a rank's step."""

    weights: list[Tensor]  # as they rest
    computed: list[list[Tensor]]  # as each forward and each backward read them
    gradients: list[Tensor]


def run_thin_steps(plan: Plan, mesh: MeshShape, steps: int = 2, micro_batches: int = 1) -> list[list[ThinStep]]:
    """Return each step's records, by rank."""

    def rank(world: World) -> list[ThinStep]:
        own = replace(plan, local_size=mesh.local)
        model = npuzero.zero(build_seeded_model(0, MatrixChain), plan=own, world=world, units=is_matrix)
        optimizer = npuzero.AdamW(model.parameters(), lr=1e-2, eps=1e-3)
        seen = []
        for step in range(steps):
            weights = list(npuzero.full_state_dict(model, rank0_only=False).values())
            computed: list[list[Tensor]] = []
            for micro_batch in range(micro_batches):
                model.seen.clear()
                chain_loss(model, chain_batch(step, micro_batch, world.rank)).backward()
                computed.append(list(model.seen))
            gradients = [npuzero.full_gradient(p) for p in model.parameters()]
            seen.append(ThinStep(weights, computed, [g for g in gradients if g is not None]))
            optimizer.step()
            optimizer.zero_grad()
        npuzero.full_state_dict(model, rank0_only=False)
        return seen

    return comm.run_threads(mesh.world, rank)


def check_thin(plan: Plan, mesh: MeshShape, **options: int) -> None:
    """Check that every rank's computed weights and sums have the oracle's bits."""
    oracle = ThinOracle(plan, mesh)
    ranks = run_thin_steps(plan, mesh, **options)
    micro_batches = options.get("micro_batches", 1)
    for step, first in enumerate(ranks[0]):
        dtype = plan.precision.parameters or torch.float32
        resting = [weight.to(dtype) for weight in first.weights]
        expected = oracle.gradients(resting, step, micro_batches)
        computed = [oracle.computed_with(weight) for weight in resting]
        for seen in (rank[step] for rank in ranks):
            for micro_batch in seen.computed:
                read = [*computed, *computed[::-1]]
                assert len(micro_batch) == len(read)
                assert all(map(torch.equal, micro_batch, read))
            for got, wanted in zip(seen.gradients, expected, strict=True):
                assert torch.equal(got, wanted), (got - wanted).abs().max()


@pytest.mark.parametrize("sizes", MESHES, ids=str)
@pytest.mark.parametrize("precision", ["bf16", "fp32"])
@pytest.mark.parametrize("preset", THINNED)
def test_a_preset_has_the_oracles_bits(preset: str, precision: str, sizes: tuple[int, int]) -> None:
    check_thin(Plan.preset(preset, precision=precision), MeshShape(*sizes))


@pytest.mark.parametrize("row", ["zero0", "zero1", "zero1.5", "zero2", "zero3", "zero3-keep", "hpz", "hsdp", "mics"])
@pytest.mark.parametrize("micro_batches", [1, 2])
@pytest.mark.parametrize("precision", ["bf16", "fp32"])
def test_any_plan_may_carry_thin_wires(row: str, micro_batches: int, precision: str) -> None:
    wires = {"node": "int4", "local": "int8"}
    carried = Precision({"bf16": torch.bfloat16, "fp32": torch.float32}[precision], gathers="int8", wires=wires)
    check_thin(Plan.preset(row, precision=carried), MeshShape(2, 2), micro_batches=micro_batches)


@pytest.mark.parametrize("wires", ["int4", "int8", {"node": "int8"}, {"local": "int4"}], ids=str)
@pytest.mark.parametrize("row", ["zero0", "zero1", "zero3", "hpz", "hsdp"])
def test_wires_by_axis(row: str, wires: Any) -> None:
    check_thin(Plan.preset(row, precision=Precision(torch.bfloat16, wires=wires)), MeshShape(2, 2))


@pytest.mark.parametrize("row", ["zero0", "hsdp", "hpz"])
def test_sums_may_be_gathered_rounded(row: str) -> None:
    check_thin(Plan.preset(row, precision=Precision(torch.bfloat16, wires="int4", sums="wire")), MeshShape(2, 2))


@pytest.mark.parametrize("feedback", ["node", "all"])
@pytest.mark.parametrize("row", ["zero0", "zero3", "hpz", "hsdp"])
def test_what_rounding_loses_is_added_the_next_time(row: str, feedback: str) -> None:
    precision = Precision(torch.bfloat16, gathers="int8", wires="int4", feedback=feedback)
    check_thin(Plan.preset(row, precision=precision), MeshShape(2, 2), steps=3, micro_batches=2)


# -- what it must not touch --------------------------------------------------------------------------------------------


def test_what_rests_is_never_rounded() -> None:
    """Full parameters, before a forward, behind one and between it and its backward, are those of a plain gather."""

    def rank(world: World, precision: Precision) -> list[dict[str, Tensor]]:
        plan = Plan.preset("zero3-keep", precision=precision)
        model = npuzero.zero(build_seeded_model(0, MatrixChain), plan=plan, world=world, units=is_matrix)
        found = [read(model)]
        loss = chain_loss(model, chain_batch(0, 0, world.rank))
        found.append(read(model))
        loss.backward()
        found.append(read(model))
        return found

    def read(model: nn.Module) -> dict[str, Tensor]:
        with npuzero.gathered(model):
            return {name: p.detach().clone() for name, p in model.named_parameters()}

    plain = comm.run_threads(2, lambda world: rank(world, Precision(torch.bfloat16)))
    rounded = comm.run_threads(2, lambda world: rank(world, Precision(torch.bfloat16, gathers="int8")))
    for one, other in zip(plain[0], rounded[1], strict=True):
        assert all(torch.equal(one[name], other[name]) for name in one)


def test_a_write_between_steps_lasts_exactly() -> None:
    def rank(world: World) -> Tensor:
        model = npuzero.zero(
            build_seeded_model(0, MatrixChain),
            plan="thin",
            precision="bf16",
            world=world,
            local_size=1,
            units=is_matrix,
        )
        chain_loss(model, chain_batch(0, 0, world.rank)).backward()
        with npuzero.gathered(model, write=True), torch.no_grad():
            model.layers[1].weight[3, 5] = 0.7734375
        return npuzero.full_state_dict(model, rank0_only=False)["layers.1.weight"]

    before = build_seeded_model(0, MatrixChain).layers[1].weight.detach().bfloat16()
    before[3, 5] = 0.7734375
    for weight in comm.run_threads(2, rank):
        assert torch.equal(weight.bfloat16(), before)


def test_a_write_among_rounded_values_is_refused() -> None:
    class Clamped(MatrixChain):
        def forward(self, x: Tensor) -> Tensor:
            self.layers[0].register_forward_hook(lambda layer, *_: layer.weight.data.clamp_(-0.01, 0.01))
            return super().forward(x)

    def rank(world: World) -> str:
        model = npuzero.zero(
            build_seeded_model(0, Clamped), plan="thin", precision="bf16", world=world, local_size=1, units=is_matrix
        )
        with pytest.raises(npuzero.StateError) as raised:
            chain_loss(model, chain_batch(0, 0, world.rank)).backward()
        return str(raised.value)

    for text in comm.run_threads(2, rank):
        assert "layers.0.weight" in text
        assert "rounded" in text
        assert "gathered(model, write=True)" in text


# -- everything else that a step may do --------------------------------------------------------------------------------


@pytest.mark.parametrize("value", [float("inf"), float("-inf"), float("nan")])
@pytest.mark.parametrize("preset", THINNED)
def test_an_overflow_on_one_rank_skips_the_step_on_all(preset: str, value: float) -> None:
    def rank(world: World) -> tuple[bool, float, dict[str, Tensor], dict[str, Tensor]]:
        model = npuzero.zero(
            build_seeded_model(0, MatrixChain),
            plan=preset,
            precision="fp16",
            world=world,
            local_size=2,
            units=is_matrix,
        )
        optimizer = npuzero.AdamW(model.parameters(), lr=1e-2)
        scaler = npuzero.LossScaler(init_scale=8.0)
        before = npuzero.full_state_dict(model, rank0_only=False)
        loss = scaler.scale(chain_loss(model, chain_batch(0, 0, world.rank)))
        if world.rank == 2:
            handle = model.layers[1].weight.register_hook(lambda g: g.index_fill(0, torch.tensor([4]), value))
        loss.backward()
        if world.rank == 2:
            handle.remove()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        after = npuzero.full_state_dict(model, rank0_only=False)
        # The next step is taken: nothing of the overflow stays, neither in sums nor in the error feedback.
        scaler.scale(chain_loss(model, chain_batch(1, 0, world.rank))).backward()
        scaler.step(optimizer)
        scaler.update()
        last = npuzero.full_state_dict(model, rank0_only=False)
        finite = all(bool(weight.isfinite().all()) for weight in last.values())
        moved = any(not torch.equal(last[name], after[name]) for name in last)
        return finite and moved, scaler.get_scale(), before, after

    for taken, scale, before, after in comm.run_threads(4, rank):
        assert taken
        assert scale == 4.0
        assert all(torch.equal(before[name], after[name]) for name in before)


@pytest.mark.parametrize("offload", [None, "host", "nvme", "host+parameters", "nvme+parameters"])
@pytest.mark.parametrize("feedback", [None, "all"])
def test_tiers_have_the_resident_runs_bits(offload: str | None, feedback: str | None, tmp_path: Any) -> None:
    def run(offload: str | None) -> list[dict[str, Tensor]]:
        precision = Precision(torch.bfloat16, gathers="int8", wires="int4", feedback=feedback)
        plan = Plan.preset("zero3", precision=precision, local_size=1)

        def rank(world: World) -> dict[str, Tensor]:
            settings = npuzero.Settings(nvme_paths=(str(tmp_path),))
            model = npuzero.zero(
                build_seeded_model(0, MatrixChain),
                plan=plan if offload is None else plan.offloaded(offload),
                world=world,
                settings=settings,
                units=is_matrix,
            )
            optimizer = npuzero.AdamW(model.parameters(), lr=1e-2, eps=1e-3)
            for step in range(3):
                for micro_batch in range(2):
                    chain_loss(model, chain_batch(step, micro_batch, world.rank)).backward()
                npuzero.clip_grad_norm_(model, 0.01)
                optimizer.step()
                optimizer.zero_grad()
            return npuzero.full_state_dict(model, rank0_only=False)

        return comm.run_threads(2, rank)

    for got, wanted in zip(run(offload), run(None), strict=True):
        assert all(torch.equal(got[name], wanted[name]) for name in wanted)


def test_no_sync_sends_what_it_kept_in_one() -> None:
    """Micro-batches under no_sync are one reduction: as many bytes as of one micro-batch."""

    def rank(world: World, micro_batches: int) -> dict[str, int]:
        model = npuzero.zero(
            build_seeded_model(0, MatrixChain),
            plan="zero++",
            precision="bf16",
            world=world,
            local_size=2,
            units=is_matrix,
        )
        optimizer = npuzero.AdamW(model.parameters(), lr=1e-2)
        for step in range(2):
            for micro_batch in range(micro_batches - 1):
                with npuzero.no_sync(model):
                    chain_loss(model, chain_batch(step, micro_batch, world.rank)).backward()
            chain_loss(model, chain_batch(step, 9, world.rank)).backward()
            optimizer.step()
            optimizer.zero_grad()
        npuzero.full_state_dict(model, rank0_only=False)
        return npuzero.report(model).bytes_sent

    one, three = (comm.run_threads(4, lambda world, n=n: rank(world, n))[0] for n in (1, 3))
    assert one["all_to_all"] == three["all_to_all"] > 0
