"""Activations as they are predicted on meta, against those of a real step on the CPU.

Measured are the storages of the tensors that ops make and that live, at their most (:mod:`planner.storages`); a unit's
gradients are dropped once the last of them is there, as the engine packs them. The system's own count of the
process's memory is held against the prediction in :mod:`planner.test_peak`.
"""

from __future__ import annotations

from functools import partial

import pytest
import torch

from npuzero.planner.model_work.units import measure_workload
from npuzero.planner.timing.memory import activation_bytes
from npuzero.shard.layout.find_units import discover_units
from planner.activating import ALL, CONFIGS, ActivationCase, random_tokens
from planner.storages import drop_unit_gradients, measure_peak_storage

pytestmark = [
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore:.*None of the inputs have requires_grad"),
]

MICRO_BATCH, SEQUENCE = 2, 192


def measure_activations(case: ActivationCase, micro_batch: int = MICRO_BATCH, sequence: int = SEQUENCE) -> int:
    for spec in discover_units(case.model):
        drop_unit_gradients(parameter for _, parameter in spec.parameters)
    ids = random_tokens(micro_batch, sequence)
    case.loss(ids).backward()  # what libraries keep from their first call is not this step's
    return measure_peak_storage(lambda: case.loss(ids).backward())


@pytest.mark.checkered
@pytest.mark.parametrize("recompute", [False, True], ids=["kept", "recomputed"])
@pytest.mark.parametrize(
    ("name", "attention"),
    # Those in plain torch ask for F.scaled_dot_product_attention, with which the CPU keeps no scores.
    [
        *((name, "flash") for name in ALL),
        *(pytest.param(name, "plain", marks=pytest.mark.slow if name == "t5" else ()) for name in CONFIGS),
    ],
)
def test_the_peak_of_a_step_is_predicted(name, attention, recompute):
    case = ActivationCase.of(name, attention=attention, recompute=recompute)
    work = measure_workload(case.shape, SEQUENCE, MICRO_BATCH, attention, torch.float32, cpu=True)
    assert activation_bytes(work, recompute) == pytest.approx(measure_activations(case), rel=0.001)


@pytest.mark.parametrize("recompute", [False, True], ids=["kept", "recomputed"])
@pytest.mark.parametrize("name", ["gpt", "llama", "gpt2"])
def test_it_is_in_16_bits(name, recompute):
    case = ActivationCase.of(name, torch.bfloat16, recompute=recompute)
    work = measure_workload(case.shape, SEQUENCE, MICRO_BATCH, dtype=torch.bfloat16, cpu=True)
    # The CPU keeps the statistics of a LayerNorm in bfloat16, accelerators and meta in float32.
    assert activation_bytes(work, recompute) == pytest.approx(measure_activations(case), rel=0.01)


@pytest.mark.parametrize(("micro_batch", "sequence"), [(1, 64), (3, 160)])
def test_it_follows_the_tokens(micro_batch, sequence):
    case = ActivationCase.of("llama")
    work = measure_workload(case.shape, sequence, micro_batch, dtype=torch.float32, cpu=True)
    assert activation_bytes(work) == pytest.approx(measure_activations(case, micro_batch, sequence), rel=0.001)


def test_recomputation_takes_less_and_flash_attention_too():
    shape = ActivationCase.of("llama").shape
    peak = {
        (attention, recompute): activation_bytes(measure_workload(shape, 512, 2, attention), recompute)
        for attention in ("flash", "plain")
        for recompute in (False, True)
    }
    assert peak["flash", True] < peak["flash", False] < peak["plain", False]
    assert peak["flash", True] < peak["plain", True] < peak["plain", False]


def test_more_sequences_take_more():
    shape = ActivationCase.of("gpt2").shape
    sizes = [partial(activation_bytes, measure_workload(shape, 64, count)) for count in (1, 2, 3, 4)]
    for recompute in (False, True):
        found = [size(recompute) for size in sizes]
        assert found == sorted(found) and found[0] < found[-1]
