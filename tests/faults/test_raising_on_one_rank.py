"""An exception inside a move of the engine on one rank only, caught by its program: either the ranks are out of step
and all of them soon get an error, or they are in step and continue with the right bits.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import npuzero
from faults.raising import (
    ERRORS,
    READING,
    Make,
    RaisingRun,
    out_of_memory,
    raising_at,
    run_raising_ranks,
    run_without_raising,
    watch_calls,
)
from npuzero import CollectiveError, NpuZeroError, StateError, comm
from npuzero.comm import World
from world.toy import build_seeded_model
from world.train import State, assert_same_bits

SLOW = pytest.mark.slow
CULPRIT = 1


@pytest.fixture(autouse=True)
def _watched(monkeypatch: pytest.MonkeyPatch) -> None:
    watch_calls(monkeypatch)


def one_rank_outcome(world: World, name: str, phase: str, n: int, folder: Path) -> Any:
    """Return the call that raised in the third of five batches, with the rank's run or the error that ended it."""
    run = RaisingRun(world, name, folder)
    try:
        for step in range(5):
            strikes = step == 2 and world.rank == CULPRIT
            run.part(phase, n if strikes else None, out_of_memory, step)
        return run.course.hits, run.end()
    except NpuZeroError as error:
        return run.course.hits, error


@pytest.mark.parametrize(
    ("name", "phase", "n"),
    [
        ("zero3", "forward", 4),
        ("zero3", "backward", 8),
        ("zero1", "backward", 3),
        ("zero3", "full_state_dict", 5),
        *(
            pytest.param(name, phase, n, marks=SLOW)
            for name in ("zero1", "zero2", "zero3", "zero3-keep", "hpz", "hsdp", "thin", "offload3")
            for phase in ("forward", "backward", "second micro-batch", "evaluation", "full_state_dict")
            for n in range(0, 40, 3)
        ),
    ],
)
def test_nothing_is_wrong_in_silence(name: str, phase: str, n: int, tmp_path: Path) -> None:
    outcomes = run_raising_ranks(name, lambda world: one_rank_outcome(world, name, phase, n, tmp_path))
    courses = [course for _, course in outcomes]
    if any(isinstance(course, NpuZeroError) for course in courses):
        assert all(isinstance(course, (CollectiveError, StateError)) for course in courses)
        return
    # The ranks stay in step: nothing raised, or the error lost nothing.
    assert not outcomes[CULPRIT][0] or phase in READING
    for course in courses:
        assert_same_bits(course.state, run_without_raising(name, tmp_path, range(5), phase).state)


def pipeline_run(world: World, n: int | None, make: Make, culprit: int, skip: bool) -> State | NpuZeroError:
    """Train on five batches over two stages; the third raises on the culprit, or is left out."""
    mesh = npuzero.mesh(world=world, pipe=2)
    net = build_seeded_model(0, lambda: nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(4))))
    pipe = npuzero.pipeline(net, mesh, plan="zero2", loss_fn=nn.functional.mse_loss, schedule="1f1b", micro_batches=2)
    optimizer = npuzero.AdamW(pipe.parameters(), lr=1e-2)
    try:
        for step in range(5):
            if step == 2 and skip:
                continue
            batch = torch.randn(4, 8, generator=torch.Generator().manual_seed(step))
            try:
                with raising_at(n if step == 2 and world.rank == culprit else None, make) as hit:
                    pipe.step(batch, target=batch.flip(0))
            except StateError:  # a stage has raised, and every rank gets the error
                assert step == 2
                optimizer.zero_grad()
                continue
            if not hit.name:
                optimizer.step()
            optimizer.zero_grad()
        return npuzero.full_state_dict(pipe, rank0_only=False)
    except CollectiveError as error:
        return error


@pytest.mark.parametrize("error", ["out of memory", pytest.param("interrupt", marks=SLOW)])
@pytest.mark.parametrize("culprit", [0, 1])
@pytest.mark.parametrize("n", [0, 2, 5, *(pytest.param(n, marks=SLOW) for n in range(40) if n not in (0, 2, 5))])
def test_stages_stay_in_step_or_the_world_is_broken(n: int, culprit: int, error: str) -> None:
    def run(n: int | None, skip: bool = False) -> list[State | NpuZeroError]:
        return comm.run_threads(2, lambda world: pipeline_run(world, n, ERRORS[error], culprit, skip), timeout_s=20)

    found = run(n)
    if any(isinstance(each, NpuZeroError) for each in found):
        assert all(isinstance(each, CollectiveError) for each in found)
        return
    states = [each for each in found if not isinstance(each, NpuZeroError)]
    legal = [each for skip in (True, False) for each in run(None, skip)[:1] if not isinstance(each, NpuZeroError)]
    assert any(_states_match(states, right) for right in legal)


def _states_match(states: list[State], right: State) -> bool:
    return all(torch.equal(state[name], right[name]) for state in states for name in right)
