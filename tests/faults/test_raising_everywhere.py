"""An exception at every call inside every move of the engine, caught by the program: it drops the gradients and
continues with the bits of a run without that batch, or every later use of the model is refused.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count
from pathlib import Path

import pytest
import torch

import npuzero
from faults.raising import (
    ERRORS,
    PHASES,
    PLANS,
    READING,
    RaisingRun,
    RunCourse,
    out_of_memory,
    raising_at,
    run_raising_ranks,
    run_without_raising,
    watch_calls,
)
from npuzero import NpuZeroError, StateError
from npuzero.comm import World
from world.train import assert_same_bits

QUICK = ("zero1", "zero3", "hpz", "offload")
SLOW = pytest.mark.slow


@pytest.fixture(autouse=True)
def _watched(monkeypatch: pytest.MonkeyPatch) -> None:
    watch_calls(monkeypatch)


def assert_same_course(found: RunCourse, expected: RunCourse) -> None:
    for step, mine, theirs in zip(found.trained, found.losses, expected.losses, strict=True):
        assert torch.equal(mine, theirs), f"the loss of batch {step}, after {found.hits}"
    assert_same_bits(found.state, expected.state)


def calls_to_raise_at(phase: str) -> Iterator[int | None]:
    """Yield the calls to raise at; a batch without an error follows each (none where no batch is lost)."""
    for n in count():
        yield n
        if phase not in READING:
            yield None


@pytest.mark.parametrize("error", ["out of memory", pytest.param("interrupt", marks=SLOW)])
@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize("name", [pytest.param(name, marks=() if name in QUICK else SLOW) for name in PLANS])
def test_training_goes_on(name: str, phase: str, error: str, tmp_path: Path) -> None:
    def rank(world: World) -> RunCourse:
        run = RaisingRun(world, name, tmp_path)
        for step in range(2):  # a first step allocates, and plans the prefetches of the next
            run.part(phase, None, out_of_memory, step)
        for step, n in enumerate(calls_to_raise_at(phase), 2):
            before = len(run.course.hits)
            run.part(phase, n, ERRORS[error], step)
            if n is not None and len(run.course.hits) == before:  # there are fewer calls
                return run.end()
        raise AssertionError

    found = run_raising_ranks(name, rank)
    assert all(course.hits == found[0].hits and course.trained == found[0].trained for course in found)
    assert found[0].hits or name == "zero0" or phase == "evaluation", "nothing was there to raise"
    assert_same_course(found[0], run_without_raising(name, tmp_path, found[0].trained, phase))


def refuses_every_use(run: RaisingRun) -> bool:
    """Tell whether every use of the model is an error; otherwise none may be one."""
    uses = [
        lambda: run.loss(0),
        lambda: npuzero.full_state_dict(run.model),
        lambda: [parameter.sum() for parameter in run.model.parameters()],
    ]
    outcomes = []
    for use in uses:
        try:
            use()
            outcomes.append(False)
        except NpuZeroError:
            outcomes.append(True)
    assert all(outcomes), outcomes
    return True


@pytest.mark.parametrize("error", ["out of memory", pytest.param("interrupt", marks=SLOW)])
@pytest.mark.parametrize("first", [False, pytest.param(True, marks=SLOW)], ids=["later", "first"])
@pytest.mark.parametrize("name", [pytest.param(name, marks=() if name in QUICK else SLOW) for name in PLANS])
def test_a_step_is_undone_or_the_model_refused(name: str, first: bool, error: str, tmp_path: Path) -> None:
    """``first``: in the first step, which allocates the moments."""

    def rank(world: World) -> tuple[RunCourse, int]:
        refusals = 0
        run = RaisingRun(world, name, tmp_path)
        step = 0
        for n in count():
            for _ in range(0 if first and n == 0 else 1):
                run.part("forward", None, out_of_memory, step := step + 1)
            run.settle()
            step += 1
            run.loss(step).backward()
            run.settle()
            with raising_at(n, ERRORS[error]) as hit:
                run.optimizer.step()
            run.optimizer.zero_grad()
            if not hit.name:
                run.course.trained.append(step)
                return run.end(), refusals
            run.course.hits.append(hit.name)
            try:
                run.settle()
                with torch.no_grad():
                    run.loss(0)
            except NpuZeroError:
                assert refuses_every_use(run)
                refusals += 1
                trained = run.course.trained
                run = RaisingRun(world, name, tmp_path)  # from the start, as if from the last checkpoint
                for old in trained:
                    run.part("forward", None, out_of_memory, old)
        raise AssertionError

    found = run_raising_ranks(name, rank)
    assert all(refusals == found[0][1] for _, refusals in found)
    course = found[0][0]
    expected = run_without_raising(name, tmp_path, course.trained)
    assert_same_bits(course.state, expected.state)


def test_gradients_of_a_backward_that_raised_are_refused(tmp_path: Path) -> None:
    """Refused until zero_grad() drops the gradients."""

    def rank(world: World) -> None:
        run = RaisingRun(world, "zero2", tmp_path)
        run.part("forward", None, out_of_memory, 0)
        loss = run.loss(1)
        with raising_at(6, out_of_memory) as hit:
            loss.backward()
        assert hit.name
        with pytest.raises(StateError, match="zero_grad"):
            run.optimizer.step()
        loss = run.loss(2)
        with pytest.raises(StateError, match="zero_grad"):
            loss.backward()
        with pytest.raises(StateError, match="zero_grad"):
            run.optimizer.step()
        run.optimizer.zero_grad()
        run.part("forward", None, out_of_memory, 3)

    run_raising_ranks("zero2", rank)
