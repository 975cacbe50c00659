"""The peak of a step under the engine, activations and all, as the system counts a process's memory."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

import npuzero
from benchmarks.step.memory import peak_resident_bytes, reset_peak_bytes
from npuzero import Settings
from npuzero.comm import World
from npuzero.plan import Plan
from npuzero.planner import Cluster, TrainingJob, TrainingRun
from npuzero.planner.model_work.units import measure_workload
from npuzero.planner.timing.memory import estimate_memory
from planner.activating import ActivationCase, random_tokens
from world.comm_ranks import rank_results, run_comm_ranks

CPU = torch.device("cpu")
_M_MMAP_THRESHOLD = -3  # mallopt(3)


@dataclass(frozen=True)
class PeakSetup:
    """What a rank trains."""

    name: str
    preset: str
    recompute: bool
    micro_batches: int = 2
    micro_batch: int = 4
    sequence: int = 256
    precision: str = "fp32"


def measure_training_peak(world: World, setup: PeakSetup) -> tuple[int, dict[str, int]]:
    """Return the most memory of a steady step, beside what the process has before there is a model; and the report."""
    torch.set_num_threads(1)
    # Each large tensor has pages of its own, which go back to the system when it is freed: no fragments.
    ctypes.CDLL(None).mallopt(_M_MMAP_THRESHOLD, 2**18)
    ActivationCase.of(setup.name).loss(random_tokens(1, 16)).backward()  # what libraries and threads take
    reset_peak_bytes(CPU)
    before = peak_resident_bytes(
        CPU
    )  # counted as the peak is: pages that a process has from the one that forked it, whole
    case = ActivationCase.of(setup.name, recompute=setup.recompute)
    model = npuzero.zero(case.model, setup.preset, precision=setup.precision, world=world)
    optimizer = npuzero.AdamW(model.parameters(), lr=1e-3)
    ids = random_tokens(setup.micro_batch, setup.sequence)

    def step() -> None:
        for _ in range(setup.micro_batches):
            case.loss(ids).backward()
        optimizer.step()
        optimizer.zero_grad()

    step()
    step()
    assert reset_peak_bytes(CPU)
    step()
    return peak_resident_bytes(CPU) - before, npuzero.report(model).memory


def predict_peak(setup: PeakSetup, ranks: int) -> tuple[int, dict[str, int]]:
    plan = Plan.preset(setup.preset, precision=setup.precision)
    shape = ActivationCase.of(setup.name).shape
    mesh = plan.mesh_shape(ranks)
    settings = Settings()
    report = shape.predict(plan, mesh, settings, micro_batches=setup.micro_batches)
    job = TrainingJob(shape, Cluster.named(f"{ranks}xcpu/{ranks}"), setup.sequence, clip=False)
    run = TrainingRun(plan, mesh, setup.micro_batch, setup.micro_batches, setup.recompute, settings)
    dtype = plan.precision.parameter_of(torch.float32)
    work = measure_workload(shape, setup.sequence, setup.micro_batch, dtype=dtype, cpu=True)
    return estimate_memory(job, run, report, work)["device"], report.memory


@pytest.mark.world
@pytest.mark.slow
@pytest.mark.parametrize("recompute", [False, True], ids=["kept", "recomputed"])
@pytest.mark.parametrize("preset", ["zero0", "zero2", "zero3"])
@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_a_processs_peak_is_predicted(name: str, preset: str, recompute: bool, tmp_path: Path) -> None:
    # As many tokens as make the process's own few megabytes small.
    setup = PeakSetup(name, preset, recompute, micro_batch=24 if recompute else 12)
    outcome: Any = rank_results(run_comm_ranks(2, measure_training_peak, setup, folder=tmp_path, limit_s=240))
    said, reported = predict_peak(setup, 2)
    for found, held in outcome:
        assert held == reported
        assert found == pytest.approx(said, rel=0.05)
