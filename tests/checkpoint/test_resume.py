"""A checkpoint of any plan on any number of ranks resumes under any other, as if uninterrupted."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest

import npuzero
from npuzero import comm
from npuzero.comm import World
from world.train import assert_same_bits, assert_states_close

from .training import CheckpointTraining, State

SAVED, END = 2, 4
#: Largest difference, relative to a tensor's largest magnitude, from another order of sums over these steps.
BOUND = 1e-6

Case = tuple[str, int]
ALL: list[Case] = [(plan, ranks) for ranks in (1, 2, 3, 4) for plan in npuzero.PRESETS]
QUICK: dict[Case, list[Case]] = {
    ("zero3", 2): [("zero3", 2), ("zero0", 1), ("hsdp", 4), ("zero1", 3)],
    ("zero1", 2): [("zero2", 2), ("zero3", 4)],
    ("zero0", 1): [("zero3", 2), ("zero1.5", 4)],
    ("hpz", 4): [("hpz", 4), ("mics", 2), ("zero3-keep", 3)],
    ("zero2", 3): [("zero3", 3), ("zero0", 2)],
    # each rank writes a part of a shard that several ranks hold
    ("hsdp", 4): [("zero3", 2)],
    ("mics", 4): [("zero3", 2)],
    ("zero1.5", 4): [("zero3", 2), ("hsdp", 4)],
}
ONE_LEVEL = ("zero0", "zero1", "zero2", "zero3", "zero3-keep")


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory):
    """Return the folder that a plan on this many ranks has saved into, and the saved state."""

    @cache
    def save(plan: str, ranks: int) -> tuple[Path, State]:
        folder = tmp_path_factory.mktemp(f"{plan}-{ranks}")

        def train(world: World) -> State:
            training = CheckpointTraining(world, plan)
            training.steps(0, SAVED)
            training.save(folder, SAVED)
            return training.state()

        return folder, comm.run_threads(ranks, train)[0]

    return save


@cache
def train_unbroken(plan: str, ranks: int) -> State:
    def train(world: World) -> State:
        training = CheckpointTraining(world, plan)
        training.steps(0, END)
        return training.state()

    return comm.run_threads(ranks, train)[0]


def check_each_resumes(saved, case: Case, sources: list[Case]) -> None:
    """One model loads each checkpoint in turn, so that each load also replaces the state of the previous one."""
    plan, ranks = case
    folders = [saved(*source) for source in sources]

    def resume(world: World) -> list[tuple[State, State]]:
        training = CheckpointTraining(world, plan, seed=1)
        found = []
        for folder, _ in folders:
            assert training.load(folder).step == SAVED
            loaded = training.state()
            training.losses = loaded["losses"].tolist()[:0]
            training.steps(SAVED, END)
            found.append((loaded, training.state()))
            training.losses = []
        return found

    for rank in comm.run_threads(ranks, resume):
        for source, (_, written), (loaded, end) in zip(sources, folders, rank, strict=True):
            exact = {name: value for name, value in written.items() if name != "losses"}
            assert_same_bits({name: value for name, value in loaded.items() if name != "losses"}, exact)
            expected = train_unbroken(plan, ranks)
            expected = expected | {"losses": expected["losses"][SAVED:]}
            if source[1] == ranks and {plan, source[0]} <= set(ONE_LEVEL):
                assert_same_bits(end, expected)
            else:
                assert_states_close(end, expected, BOUND)


@pytest.mark.parametrize("case", sorted({case for cases in QUICK.values() for case in cases}), ids=str)
def test_some_pairs(case: Case, saved) -> None:
    check_each_resumes(saved, case, [source for source, cases in QUICK.items() if case in cases])


@pytest.mark.slow
@pytest.mark.parametrize("case", ALL, ids=str)
def test_all_pairs(case: Case, saved) -> None:
    check_each_resumes(saved, case, ALL)
