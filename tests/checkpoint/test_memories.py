"""States saved from any memory load into any other, in chunks of any size, on any number of ranks, bit for bit."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from npuzero import Plan, Settings, checkpoint, comm
from npuzero.comm import World
from world.test_optimizers import optimizer_state
from world.test_tiers import HOST, NVME, PRECISIONS, folders, placed_plan
from world.toy import build_seeded_model
from world.train import CutSession, State, assert_same_bits

__all__ = ["folders"]  # a fixture


class StatesPlacement(NamedTuple):
    """The placement of the states, and the number of ranks."""

    ranks: int = 2
    chunk_bytes: int = 3000
    where: dict[str, Any] | None = None

    def row(self, precision: str) -> Plan:
        if self.where is None:
            return Plan.preset("zero3", precision=PRECISIONS[precision], local_size=1)
        return placed_plan("zero3", PRECISIONS[precision], self.ranks, **self.where)


KINDS = {
    "device": StatesPlacement(),
    "host": StatesPlacement(where={"memory": HOST, "gradients": True}),
    "files": StatesPlacement(where={"memory": NVME}),
    "a part": StatesPlacement(where={"memory": HOST, "share": 0.3}),
    "a part in files": StatesPlacement(where={"memory": NVME, "share": 0.3}),
    "other chunks": StatesPlacement(chunk_bytes=20000, where={"memory": NVME}),
    "parameters in files": StatesPlacement(where={"memory": NVME, "parameters": NVME}),
    "parameters on the host": StatesPlacement(ranks=3, where={"memory": NVME, "parameters": HOST}),
    "three ranks": StatesPlacement(ranks=3, where={"memory": NVME}),
    "three ranks' devices": StatesPlacement(ranks=3),
}
QUICK = [
    ("8 bits", "files", "a part"),
    ("split", "three ranks", "other chunks"),
    ("drawn", "host", "files"),
    ("bf16", "parameters in files", "parameters on the host"),
]
ALL = [(precision, saved, loaded) for precision in PRECISIONS for saved in KINDS for loaded in KINDS]


class PlacedStatesRun:
    def __init__(self, world: World, kind: StatesPlacement, precision: str, seed: int = 0) -> None:
        settings = Settings(chunk_bytes=kind.chunk_bytes)
        self.session = CutSession(build_seeded_model(seed), world, plan=kind.row(precision), settings=settings)
        self.optimizer = self.session.optimizer(torch.optim.AdamW, lr=1e-2)

    def step(self, number: int) -> None:
        self.session.loss(number).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def state(self) -> State:
        return optimizer_state(self.optimizer) | self.session.state()


def saved_and_next(folder: Path, kind: StatesPlacement, precision: str) -> tuple[State, State]:
    """Return the state saved right after a step, and the state after the next step."""

    def rank(world: World) -> tuple[State, State]:
        run = PlacedStatesRun(world, kind, precision)
        for number in range(2):
            run.step(number)
        checkpoint.save(folder, run.session.model, run.optimizer, step=2)
        state = run.state()
        run.step(2)
        return state, run.state()

    return comm.run_threads(kind.ranks, rank)[0]


def loaded_and_next(folder: Path, kind: StatesPlacement, precision: str) -> tuple[State, State]:
    def rank(world: World) -> tuple[State, State]:
        run = PlacedStatesRun(world, kind, precision, seed=1)
        checkpoint.load(folder, run.session.model, run.optimizer)
        state = run.state()
        run.step(2)
        return state, run.state()

    return comm.run_threads(kind.ranks, rank)[0]


@pytest.fixture(scope="module")
def once(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Any]:
    """Run once the part that several cases share."""
    known: dict[Any, Any] = {}

    def run(work: Callable[..., Any], name: str, precision: str, source: str | None = None) -> tuple[Path, Any]:
        key = work, name, precision, source
        if key not in known:
            folder = (
                tmp_path_factory.mktemp("saved")
                if source is None
                else known[saved_and_next, source, precision, None][0]
            )
            known[key] = folder, work(folder, KINDS[name], precision)
        return known[key]

    return run


@pytest.mark.parametrize(
    ("precision", "saved", "loaded"),
    [*QUICK, *(pytest.param(*case, marks=pytest.mark.slow) for case in ALL if case not in QUICK)],
)
def test_any_memory_goes_on_from_any_other(precision: str, saved: str, loaded: str, once: Callable[..., Any]) -> None:
    """Compare with the uninterrupted run if the ranks are as many, else with a device run on as many ranks."""
    folder, (state, uninterrupted) = once(saved_and_next, saved, precision)
    found = loaded_and_next(folder, KINDS[loaded], precision)
    assert_same_bits(found[0], state)
    if KINDS[saved].ranks == KINDS[loaded].ranks:
        assert_same_bits(found[1], uninterrupted)
    else:
        resident = "three ranks' devices" if KINDS[loaded].ranks == 3 else "device"
        assert_same_bits(found[1], once(loaded_and_next, resident, precision, saved)[1][1])
