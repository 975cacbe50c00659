"""An update that overlaps the program uses the options of its own step, in spite of later changes."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch

from npuzero import Memory, Plan, Settings
from world.train import Session, assert_same_bits, run_cut


def train_changing_options(fused: bool, session: Session) -> None:
    """Each step has another lr and weight decay, set as soon as ``step()`` has returned."""
    optimizer = session.optimizer(torch.optim.AdamW, fused=fused, lr=1e-3)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: (step + 1) ** 2)
    for step in range(3):
        session.loss(step).backward()
        optimizer.step()
        schedule.step()
        optimizer.param_groups[0]["weight_decay"] = 0.1 * step
        optimizer.zero_grad()


@pytest.mark.parametrize(
    ("memory", "fused"),
    [(Memory.HOST, True), (Memory.HOST, False), (Memory.NVME, True)],
    ids=["host", "torch's", "nvme"],
)
def test_a_schedule_moves_no_bit(memory: Memory, fused: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NPUZERO_NVME_PATHS", str(tmp_path))
    resident = Plan.preset("zero3")
    far = replace(resident, states=replace(resident.states, memory=memory))
    slow = Settings(chunk_bytes=1000)  # so many chunks that the program is the first to go on
    run = partial(run_cut, partial(train_changing_options, fused), 2, settings=slow)
    states = [run(plan=plan)[0] for plan in (resident, far)]
    assert_same_bits(states[1], states[0])
