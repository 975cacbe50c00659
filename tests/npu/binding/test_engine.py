"""Training on the emulated device, end to end: it equals the CPU's, whose collectives sum in the same order."""

from __future__ import annotations

import functools
import multiprocessing
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from npu.binding import engine_cases
from npu.binding.engine_cases import IN_8_BITS, MICRO_BATCHES, RECIPE, with_scaler
from npu.binding.ranks import run_npu_ranks
from npu.fake import libraries
from npuzero.plan import OFFLOADED, OFFLOADS
from world.parity_ranks import STAGES
from world.train import assert_states_close

#: What calculates a scenario on the CPU: its digest, and its values.
OnCpu = Callable[..., tuple[str, dict[str, Any]]]


@pytest.fixture(scope="module")
def kernels() -> dict[str, str]:
    """Variables that let ranks find the emulated kernels."""
    return {"NPUZERO_NPU_KERNELS": str(libraries.build_fake_kernels())}


@pytest.fixture(scope="module")
def on_cpu() -> Iterator[OnCpu]:
    """In a process of its own: here torch_npu may be at work, which wants its part in whatever is seeded."""
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        yield functools.cache(lambda *what, **options: pool.apply(engine_cases.train_on_cpu, what, options))


@pytest.fixture(scope="module", params=["0", pytest.param("500", marks=pytest.mark.slow)])
def ranks(request: pytest.FixtureRequest, kernels, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What two ranks return of all cases that want the same variables; to load torch_npu takes longer than any case.

    Work on the device comes this many us late: whoever forgot to wait for a stream reads what was there before.
    """
    folder = tmp_path_factory.mktemp("ranks")
    return run_npu_ranks(
        "engine_cases:run_engine_cases", 2, folder, limit_s=600, **kernels, FAKE_NPU_DELAY_US=request.param
    )


def test_every_stage_trains_to_the_bits_of_the_cpu(ranks, on_cpu: OnCpu):
    plain, micro_batches = (on_cpu(*what)[0] for what in ((RECIPE, "zero0"), (MICRO_BATCHES, "zero3")))
    expected = dict.fromkeys(STAGES, plain) | {"micro-batches": micro_batches}
    assert [rank["digest_stages"] for rank in ranks] == [expected] * 2


def test_states_off_the_device_train_to_the_bits_of_the_cpu(ranks, on_cpu: OnCpu):
    plain, micro_batches = (on_cpu(recipe, "zero3")[0] for recipe in (RECIPE, MICRO_BATCHES))
    expected = {
        f"{memory}, {what}": digest
        for memory in OFFLOADS
        for what, digest in (("plain", plain), ("micro-batches", micro_batches))
    }
    assert [rank["digest_offloaded"] for rank in ranks] == [expected] * 2


def test_the_device_updates_what_rests_off_it_to_the_bits_of_the_cpu(ranks, on_cpu: OnCpu):
    """Its kernels read and write the host's memory, where that is registered, at the device's own addresses of it."""
    plain = dict.fromkeys(("host", "nvme", "share"), on_cpu(RECIPE, "zero3")[0])
    others = {
        "scaler": on_cpu(with_scaler, "zero3")[0],
        "8 bits": on_cpu(RECIPE, "zero3", precision=IN_8_BITS)[0],
    }
    assert [rank["by_device"] for rank in ranks] == [plain | others] * 2


def test_copies_between_the_device_and_the_host_are_those_foretold(ranks):
    for rank in ranks:
        found = rank["measure_host_copies"]
        assert found.keys() == {*OFFLOADED}
        for counted, foretold in found.values():
            assert counted == foretold and all(counted.values())


def test_a_training_state_leaves_the_device_and_comes_back_to_the_bit(ranks, on_cpu: OnCpu):
    expected = dict.fromkeys(("zero1", "zero3", "offload3"), on_cpu(RECIPE, "zero0")[0])
    assert [rank["away"] for rank in ranks] == [expected] * 2


@pytest.mark.slow
def test_moments_in_8_bits_and_a_loss_scaler_train_to_the_bits_of_the_cpu(kernels, on_cpu: OnCpu, tmp_path: Path):
    expected = {
        "8 bits": on_cpu(RECIPE, "zero3", precision=IN_8_BITS)[0],
        "scaler": on_cpu(with_scaler, "zero3")[0],
    }
    assert run_npu_ranks("engine_cases:other_states", 2, tmp_path, **kernels) == [expected] * 2


@pytest.mark.slow
def test_bfloat16_trains_as_on_the_cpu(kernels, on_cpu: OnCpu, tmp_path: Path):
    found = run_npu_ranks("engine_cases:low_precision", 2, tmp_path, **kernels)[0]
    cpu = on_cpu(RECIPE, "zero3", precision="bf16")[1]
    assert_states_close(*({name: torch.tensor(value) for name, value in state.items()} for state in (found, cpu)), 0.05)


@pytest.mark.slow
def test_a_steady_step_reads_nothing_on_the_host(kernels, tmp_path: Path):
    (first, without), (second, _) = run_npu_ranks("engine_cases:measure_steady_step", 2, tmp_path, **kernels)
    assert first == second > 0
    assert without == []
