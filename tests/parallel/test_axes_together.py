"""Tensor, sequence and pipeline ranks in one mesh, as the planner recommends them: training equals plain torch's."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import npuzero
from npuzero import parallel
from npuzero.comm import World, run_threads
from parallel.tensor_models import build_tensor_llama, tensor_batch
from world.conftest import one_thread_per_rank  # noqa: F401
from world.toy import build_seeded_model

STEPS, LR = 3, 1e-2
#: Each mesh sums in another order, and Adam's first steps turn the rounding of small gradients into fractions of LR.
APART = 0.02 * LR


def train_llama_plain() -> dict[str, Tensor]:
    model = build_seeded_model(make=build_tensor_llama)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR)
    for step in range(STEPS):
        model(**tensor_batch(step, 0)).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


@pytest.mark.parametrize(
    ("preset", "axes"),
    [
        ("zero1", {"pipe": 2, "tensor": 2, "sequence": 2}),
        ("zero3", {"pipe": 2, "tensor": 2, "sequence": 2}),
        ("zero1", {"pipe": 2, "sequence": 2}),
        ("zero3", {"tensor": 2, "sequence": 2}),
    ],
)
def test_axes_together_train_as_plain_torch(preset: str, axes: dict[str, int]) -> None:
    def rank(world: World) -> dict[str, Tensor]:
        mesh = npuzero.mesh(world=world, **axes)
        model = build_seeded_model(make=build_tensor_llama)
        if "tensor" in axes:
            parallel.tensor(model, mesh)
        parallel.sequence(model, mesh)
        if "pipe" in axes:
            model = npuzero.pipeline(model, mesh, plan=preset, micro_batches=2)
        else:
            model = npuzero.zero(model, plan=preset, mesh=mesh)
        optimizer = npuzero.AdamW(model.parameters(), lr=LR)
        for step in range(STEPS):
            part = parallel.slice(tensor_batch(step, 0), mesh)  # the slices of one batch, as only one group shares data
            if "pipe" in axes:
                model.step(**part)
            else:
                model(**part).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        return npuzero.full_state_dict(model)

    size = axes.get("pipe", 1) * axes.get("tensor", 1) * axes["sequence"]
    found = run_threads(size, rank)[0]
    expected = train_llama_plain()
    assert expected.keys() <= found.keys()
    for name, value in expected.items():
        torch.testing.assert_close(found[name].float(), value, rtol=0, atol=APART, msg=lambda m, n=name: f"{n}: {m}")
