"""The system's count of disk bytes in a steady step equals the prediction, to the byte."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import pytest
import torch

import npuzero
from npuzero import Memory, Plan, Settings, _native
from npuzero.comm import World
from npuzero.memory.file import BLOCK, FileStore
from npuzero.plan import FROM_DISK, TO_DISK
from world.comm_ranks import rank_results, run_comm_ranks
from world.test_far_traffic import offloaded_plan
from world.toy import build_seeded_model
from world.train import CutSession

#: The first steps allocate the moments, load each kernel's code, and write to reserved but unwritten file space. Of
#: the later ones most are exact. Other reads of a process, such as code that was paged out, are added.
WARM, STEPS = 3, 10


def read_disk_counters() -> tuple[int, int]:
    """Return this process's disk reads and writes, all threads, in bytes; O_DIRECT's count at once, others' later."""
    lines = Path("/proc/self/io").read_text().splitlines()
    found = {name: int(value) for name, value in (line.split(": ") for line in lines)}
    return found["read_bytes"], found["write_bytes"]


def measure_disk_bytes(world: World, plan: Plan, settings: Settings) -> tuple[list[tuple[int, int]], Any]:
    """Return the system's count in each step of this rank, and the last step's report."""
    session = CutSession(build_seeded_model(), world, plan=plan, settings=settings)
    optimizer = session.optimizer(torch.optim.AdamW, lr=1e-2)
    found = []
    for step in range(STEPS):
        before = read_disk_counters()
        session.loss(step).backward()
        optimizer.step()
        optimizer.zero_grad()
        report = npuzero.report(session.model)  # at the end of the update
        time.sleep(0.05)  # for what is read for the next one
        found.append(tuple(after - first for after, first in zip(read_disk_counters(), before, strict=True)))
    session.state()
    return found, report.bytes_moved


@pytest.mark.world
@pytest.mark.skipif(not os.access("/proc/self/io", os.R_OK), reason="the system does not count")
@pytest.mark.parametrize(
    ("name", "precision", "share", "settings"),
    [
        ("infinity-states", "bf16", 1.0, {"chunk_bytes": 3000}),
        ("infinity", "bf16", 1.0, {"chunk_bytes": 3000}),
        ("zero1+nvme", "bf16-8bit", 0.6, {}),
        pytest.param("hsdp+nvme", "fp32", 1.0, {"overlap": False}, marks=pytest.mark.slow),
        pytest.param("zero3+nvme", "bf16-split", 1.0, {"verify": False, "io_threads": 1}, marks=pytest.mark.slow),
    ],
)
def test_the_system_counts_what_was_foretold(
    name: str, precision: str, share: float, settings: dict[str, Any], tmp_path: Path
) -> None:
    if _native.io.is_memory(str(tmp_path)) or not FileStore([tmp_path], BLOCK).direct:
        pytest.skip("no O_DIRECT here")
    plan, chosen = offloaded_plan(name, precision, share), Settings(nvme_paths=(str(tmp_path),), **settings)
    assert plan.states.memory is Memory.NVME
    foretold = npuzero.predict(build_seeded_model(), plan, 2, settings=chosen).bytes_moved
    expected = foretold[FROM_DISK], foretold[TO_DISK]
    assert all(expected)
    for found, reported in rank_results(run_comm_ranks(2, measure_disk_bytes, plan, chosen, folder=tmp_path)):
        assert (reported[FROM_DISK], reported[TO_DISK]) == expected
        steady = found[WARM:]
        assert tuple(map(min, zip(*steady, strict=True))) == expected, steady
        assert 2 * steady.count(expected) > len(steady), steady
