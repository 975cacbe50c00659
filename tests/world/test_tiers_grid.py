"""For states and gradients in any memory, and any way of training: ten steps have the bits of the resident run.

The factors below have millions of combinations. Every pair of values is in some row of a covering array, and what rests
where, in which precision, is in some row for every preset; real processes go through all rows of their number.
"""

from __future__ import annotations

import itertools
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import npuzero
from npuzero import Memory, Plan, Settings, _native
from npuzero.comm import World
from world.comm_ranks import rank_results, run_comm_ranks
from world.covering import Row, covering_rows
from world.test_lion import build_lion
from world.test_optimizers import optimizer_state
from world.test_tiers import HOST, LOCAL_SIZE, NVME, PRECISIONS
from world.toy import build_seeded_model
from world.train import CutSession, Session, State, assert_same_bits

STEPS = 10
#: The step whose loss overflows, where there is a scaler; those in which a parameter has no gradient, where some have.
OVERFLOW, WITHOUT = 4, (2, 6)
WITH_PARAMETERS = [name for name in npuzero.PRESETS if (row := Plan.preset(name)).parameters.axes == row.states.axes]
SHARDED_ALIKE = [name for name in npuzero.PRESETS if (row := Plan.preset(name)).gradients.axes == row.states.axes != ()]
FACTORS: dict[str, Any] = {
    "place": list(itertools.product(npuzero.PRESETS, (HOST, NVME))),
    "precision": list(PRECISIONS),
    "size": [4, 3, 2, 1],
    "gradients": [Memory.DEVICE, HOST],
    "parameters": [Memory.DEVICE, HOST, NVME],
    "optimizer": ["AdamW", "Lion", "torch's AdamW"],
    "chunk_bytes": [3000, 0, 20000],
    "share": [1.0, 0.6, 0.25],
    "micro_batches": [1, 3],
    "clip": [None, 0.5],
    "unused": [False, True],
    "scaler": [False, True],
    "overlap": [True, False, "gradients"],
    "update_on": ["auto", "device"],
    "early": [False, True],
}
#: Requirements of torch's optimizers on a model, and of updates inside backward on a program.
TORCHS = {
    "precision": lambda name: PRECISIONS[name].masters == PRECISIONS[name].moments == "fp32",
    "place": lambda place: place[1] is HOST,
    "share": lambda share: share == 1.0,
    "parameters": lambda memory: memory is not NVME,
    "update_on": lambda where: where == "auto",
    "early": lambda early: not early,
}
EARLY = {"clip": None, "scaler": False, "unused": False}


def is_possible_row(row: Row) -> bool:
    """Tell whether npuzero supports such a combination."""
    if row.get("gradients") is HOST and "place" in row and row["place"][0] not in SHARDED_ALIKE:
        return False
    if row.get("parameters", Memory.DEVICE) is not Memory.DEVICE and (
        row.get("share", 1.0) < 1 or ("place" in row and row["place"][0] not in WITH_PARAMETERS)
    ):
        return False
    if row.get("optimizer") == "torch's AdamW":
        return all(fits(row[name]) for name, fits in TORCHS.items() if name in row)
    return not row.get("early") or all(row[name] == value for name, value in EARLY.items() if name in row)


ROWS = covering_rows(FACTORS, is_possible_row)


def test_every_pair_is_in_some_row() -> None:
    there = {pair for row in ROWS for pair in itertools.combinations(row.items(), 2)}
    for (a, some), (b, others) in itertools.combinations(FACTORS.items(), 2):
        for x, y in itertools.product(some, others):
            assert ((((a, x), (b, y)) in there) or (((b, y), (a, x)) in there)) is is_possible_row({a: x, b: y}), (
                a,
                x,
                b,
                y,
            )
    assert all(is_possible_row(row) and list(row) for row in ROWS)
    assert len(ROWS) < 1.3 * len(FACTORS["place"]) * len(FACTORS["precision"])


def plan_and_resident(row: Row) -> tuple[Plan, Plan]:
    """Return the row's plan, and the same with everything on the device."""
    name, memory = row["place"]
    resident = Plan.preset(name, precision=PRECISIONS[row["precision"]], local_size=LOCAL_SIZE[row["size"]])
    states = replace(resident.states, memory=memory, share=row["share"])
    gradients = replace(resident.gradients, memory=row["gradients"])
    parameters = replace(resident.parameters, memory=row["parameters"])
    return replace(resident, parameters=parameters, gradients=gradients, states=states), resident


def train_grid_row(session: Session, row: Row) -> State:
    odd, even = list(session.model.parameters())[::2], list(session.model.parameters())[1::2]
    groups = [{"params": odd}, {"params": even, "weight_decay": 0.05, "betas": (0.8, 0.99)}]
    early = {"early": row["micro_batches"]} if row["early"] else {}
    if row["optimizer"] == "Lion":
        optimizer = build_lion(session, groups, **early)
    else:
        optimizer = session.optimizer(torch.optim.AdamW, groups, fused=row["optimizer"] == "AdamW", lr=1e-2, **early)
    scaler = session.scaler(init_scale=2.0**10, enabled=row["scaler"])
    for step in range(STEPS):
        overflows = row["scaler"] and step == OVERFLOW
        for micro_batch in range(row["micro_batches"]):
            loss = session.loss(step, micro_batch) * (torch.inf if overflows else 1.0 / row["micro_batches"])
            scaler.scale(loss).backward()
        if row["unused"] and step in WITHOUT:
            even[3].grad = None
        if row["scaler"]:
            scaler.unscale_(optimizer)
        if row["clip"] is not None and not overflows:
            session.clip(row["clip"])
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    return optimizer_state(optimizer) | session.state()


def grid_outcome(world: World, plan: Plan, row: Row, folders: tuple[str, ...]) -> State:
    how = {name: row[name] for name in ("chunk_bytes", "overlap", "update_on")}
    chosen = Settings(nvme_paths=folders, **how)
    return train_grid_row(CutSession(build_seeded_model(), world, plan=plan, settings=chosen), row)


def find_differing_rows(world: World, rows: list[Row], folders: tuple[str, ...]) -> list[str]:
    """Return the rows in which this rank's outcome differs from the resident one."""
    found = []
    for row in rows:
        far, resident = (grid_outcome(world, plan, row, folders) for plan in plan_and_resident(row))
        try:
            assert_same_bits(far, resident)
        except AssertionError as error:
            found.append(f"{row}: {error}")
    return found


@pytest.mark.slow
@pytest.mark.world
@pytest.mark.parametrize("size", FACTORS["size"])
def test_ten_steps(size: int, tmp_path: Path) -> None:
    if _native.io.is_memory(str(tmp_path)):
        pytest.skip("the temporary folder is in memory")
    folders = [tmp_path / "one", tmp_path / "two"]
    for folder in folders:
        folder.mkdir()
    rows = [row for row in ROWS if row["size"] == size]
    assert len(rows) >= len(FACTORS["place"])
    names = tuple(map(str, folders))
    found = rank_results(run_comm_ranks(size, find_differing_rows, rows, names, folder=tmp_path, limit_s=900.0))
    assert not any(found), "\n".join(itertools.chain.from_iterable(found))
    assert not any(map(os.listdir, folders))
