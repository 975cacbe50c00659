"""Bytes by axis, between and inside nodes: predicted equals measured, for sizes that divide nothing."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import npuzero
from npuzero import Plan, Precision, Report, comm
from npuzero.comm import World
from npuzero.plan import THINNED, FlatSize, MeshShape, StepSpec, axis_bytes, predict_bytes, ring_bytes

from .toy import build_seeded_model

MICRO_BATCHES, STEPS = 2, 3
WORLDS = [(2, 2), (2, 4), (3, 2), (4, 2)]
VERBS = ("all_gather", "reduce_scatter", "all_reduce", "all_to_all")


class OddSizedModel(nn.Module):
    """A model with no parameter size that a number of ranks divides; shards exceed the shortest message."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(inputs, outputs) for inputs, outputs in ((61, 83), (83, 47), (47, 61)))
        self.scale = nn.Parameter(torch.ones(1))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = F.gelu(block(x))
        return x * self.scale


def train_odd_sized(world: World, local: int, plan: str, precision: Precision) -> Report:
    """Return a rank's measurements of the last step."""
    model = npuzero.zero(build_seeded_model(make=OddSizedModel), plan=plan, local_size=local, precision=precision)
    optimizer = npuzero.AdamW(model.parameters())
    for step in range(STEPS):
        for micro_batch in range(MICRO_BATCHES):
            seed = 100 * step + 10 * micro_batch + world.rank
            model(torch.randn(5, 61, generator=torch.Generator().manual_seed(seed))).square().mean().backward()
        npuzero.clip_grad_norm_(model, 0.1)
        optimizer.step()
        optimizer.zero_grad()
    npuzero.full_state_dict(model, rank0_only=False)  # finishes the all-gathers of the last step
    return npuzero.report(model)


@pytest.mark.checkered
@pytest.mark.parametrize(
    "precision",
    [Precision(torch.bfloat16), pytest.param(Precision(wires=torch.bfloat16), marks=pytest.mark.slow)],
    ids=["bf16", "fp32 reduced in bf16"],
)
@pytest.mark.parametrize("plan", [*npuzero.PRESETS, *THINNED, "offload", "delayed"])
@pytest.mark.parametrize(("nodes", "local"), WORLDS)
def test_a_rank_sends_along_each_axis_what_was_foretold(
    nodes: int, local: int, plan: str, precision: Precision
) -> None:
    facts = {"micro_batches": MICRO_BATCHES, "clip": True, "precision": precision}
    expected = npuzero.predict(OddSizedModel(), plan, MeshShape(nodes, local), **facts)
    for report in comm.run_threads(nodes * local, lambda world: train_odd_sized(world, local, plan, precision)):
        assert report.sent_along == expected.sent_along and report.bytes_sent == expected.bytes_sent
        for verb, nbytes in report.bytes_sent.items():
            along = sum(verbs.get(verb, 0) for verbs in report.sent_along.values())
            assert along == (0 if verb == "control" else nbytes)


#: By axis, bytes that a rank of two nodes of four sends for each element in bfloat16 and one micro-batch. Sums that
#: ranks with equal states finish travel in float32: in ``zero0`` and ``hsdp``. In 8 and in 4 bits a 16-bit scale
#: is added, per 256 and per 128 elements.
SENT = {
    "zero0": {"node": 3.0, "local": 2.25},
    "zero1": {"node": 2.0, "local": 1.5},
    "zero2": {"node": 2.0, "local": 1.5},
    "zero3": {"node": 3.0, "local": 2.25},
    "zero3-keep": {"node": 2.0, "local": 1.5},
    "hpz": {"node": 0.5, "local": 4.5},
    "hsdp": {"node": 0.75, "local": 4.5},
    "zero++": {"node": 0.125 * (8 + 4 + 3 * 16 / 256) / 8, "local": 0.75 * (8 + 16 + 4 + 3 * 16 / 256) / 8},
    "thin": {"node": 0.125 * (8 + 4 + 3 * 16 / 256) / 8, "local": 0.75 * (8 + 16 + 16 + 16 / 256) / 8},
}


@pytest.mark.parametrize("plan", SENT)
def test_bytes_between_two_nodes_of_four_and_inside_them(plan: str) -> None:
    elements = 8 * 256 * 256  # messages are of whole lines
    row = Plan.preset(plan, precision=Precision(torch.bfloat16))
    report = predict_bytes(row, [FlatSize(0, elements, torch.bfloat16)], MeshShape(2, 4), StepSpec(1))
    assert {axis: sum(verbs.values()) / elements for axis, verbs in report.sent_along.items()} == SENT[plan]


@pytest.mark.parametrize("verb", VERBS)
@pytest.mark.parametrize("sizes", [(2, 4), (4, 2), (3, 2), (2, 3, 5), (7,)])
def test_a_collective_over_several_axes_goes_level_by_level(verb: str, sizes: tuple[int, ...]) -> None:
    named = {f"axis {i}": size for i, size in enumerate(sizes)}
    ranks = math.prod(sizes)
    nbytes = 64 * ranks
    # Along each axis a ring of its ranks, over the part of the buffer that the axes outside of it leave.
    levels = [ring_bytes(verb, nbytes // math.prod(sizes[:i]), size) for i, size in enumerate(sizes)]
    assert list(axis_bytes(verb, nbytes, named).values()) == levels
    for odd in (1, 2, 3, 1001, nbytes - 1):
        along = axis_bytes(verb, odd, named)
        assert sum(along.values()) == ring_bytes(verb, odd, ranks)
        for i, axis in enumerate(named):
            exact = ring_bytes(verb, odd * ranks, sizes[i]) / math.prod(sizes[:i]) / ranks
            assert abs(along.get(axis, 0) - exact) < 1 or not exact
