"""Ranks that die, leave or diverge: the remaining ranks get a CollectiveError soon, and leave nothing behind."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from faults import dead_ranks
from faults.dead_ranks import CULPRIT
from faults.fault_ranks import ProcessOutcome, run_faulty_ranks

pytestmark = pytest.mark.world

RANKS = 3
#: Seconds from a rank's end until all remaining ranks have their error and have ended.
SOON_S = 4.0
#: Timeout for ranks that wait in vain.
TIMEOUT_S = 2.0


#: The text expected of diverging ranks: on the collective itself, on all calls, or on the call left out.
_DIFFER = "size, dtype and tag on every|the same, in the same order|on every rank, since it is collective"


@pytest.fixture(autouse=True)
def nothing_left() -> Iterator[None]:
    before = _shared_memory_files()
    yield
    assert _shared_memory_files() <= before


@pytest.mark.parametrize("where", ("forward", "backward", "step", "between"))
@pytest.mark.parametrize(
    "stage", ("zero0", "zero3", *(pytest.param(stage, marks=pytest.mark.slow) for stage in ("zero1", "zero2", "hpz")))
)
def test_killed(stage: str, where: str) -> None:
    outcomes = run_faulty_ranks(dead_ranks.killed_in_step, RANKS, stage, where)
    assert outcomes[CULPRIT].exit_code == -9
    check_others_know(outcomes, f"rank {CULPRIT} is dead", f"Look at the last output of rank {CULPRIT}")


def test_killed_over_gloo() -> None:
    outcomes = run_faulty_ranks(dead_ranks.killed_in_step, RANKS, "zero3", "backward", backend="gloo")
    assert outcomes[CULPRIT].exit_code == -9
    check_others_know(outcomes)


@pytest.mark.parametrize("fault", (dead_ranks.dies_before_zero, dead_ranks.dies_in_zero))
def test_killed_before_training(fault: Any) -> None:
    check_others_know(run_faulty_ranks(fault, RANKS, "zero3"), f"rank {CULPRIT} is dead")


@pytest.mark.parametrize("stage", ("zero0", "zero3"))
def test_exception_on_one_rank(stage: str) -> None:
    """Its own error stays the same; the remaining ranks get theirs when the process has ended."""
    outcomes = run_faulty_ranks(dead_ranks.raises_in_forward, RANKS, stage)
    assert outcomes[CULPRIT].seen.kind == "ZeroDivisionError"
    check_others_know(outcomes, f"rank {CULPRIT}")


@pytest.mark.parametrize("stage", ("zero0", "zero3"))
def test_fewer_steps_on_one_rank(stage: str) -> None:
    outcomes = run_faulty_ranks(dead_ranks.fewer_steps, RANKS, stage)
    assert outcomes[CULPRIT].seen.kind == ""
    check_others_know(outcomes, f"rank {CULPRIT}")


@pytest.mark.parametrize(
    ("fault", "one", "other"),
    [
        (dead_ranks.skips_block, r"blocks\.1", r"blocks\.2"),
        (dead_ranks.skips_backward, "gather root", "a step without a backward pass"),
        (dead_ranks.evaluates_alone, r"blocks\.0", r"blocks\.2"),
        (dead_ranks.saves_alone, "in full_state_dict at", "without full_state_dict"),
    ],
)
def test_another_way(fault: Any, one: str, other: str) -> None:
    """With sharded parameters, a branch that differs by rank is an error that names the operation of each side."""
    outcomes = run_faulty_ranks(fault, RANKS, "zero3")
    for rank, outcome in enumerate(outcomes):
        assert outcome.exit_code == 0
        _check_typed_error(outcome, rank, _DIFFER, "rank 0", "rank 1|, 1", "2: ", one, other, "branch")


@pytest.mark.parametrize("stage", ("zero0", "zero1", "zero2"))
def test_a_block_that_one_rank_leaves_out_adds_zeros(stage: str) -> None:
    for outcome in run_faulty_ranks(dead_ranks.skips_block, RANKS, stage):
        assert outcome.exit_code == 0
        assert outcome.seen.kind == "", outcome.seen.trace


@pytest.mark.parametrize("where", ("forward", "step"))
def test_rank_that_never_comes(where: str) -> None:
    outcomes = run_faulty_ranks(dead_ranks.never_comes, RANKS, "zero3", where, timeout_s=TIMEOUT_S)
    for rank, outcome in enumerate(outcomes):
        _check_typed_error(
            outcome, rank, "within 2 s", f"waits for rank {CULPRIT}", f"rank {CULPRIT} has finished", "timeout_s"
        )


@pytest.mark.parametrize("stage", ("zero1", "zero3"))
def test_ranks_that_wait_for_each_other_in_different_channels(stage: str) -> None:
    outcomes = run_faulty_ranks(dead_ranks.skips_step, RANKS, stage)
    for rank, outcome in enumerate(outcomes):
        _check_typed_error(
            outcome, rank, _DIFFER, "rank 0, 2: in optimizer.step at", f"rank {CULPRIT}: (in|went on to)"
        )
        assert outcome.seen.after_s < SOON_S


def check_others_know(outcomes: list[ProcessOutcome], *says: str) -> None:
    died_s = outcomes[CULPRIT].ended_s
    for rank, outcome in enumerate(outcomes):
        if rank != CULPRIT:
            assert outcome.exit_code == 0, f"rank {rank}: {outcome}"
            _check_typed_error(outcome, rank, *says)
            assert outcome.ended_s - died_s < SOON_S


def _check_typed_error(outcome: ProcessOutcome, rank: int, *says: str) -> None:
    seen = outcome.seen
    assert seen is not None, f"rank {rank} ended with {outcome.exit_code} (None: it hung)"
    assert seen.kind == "CollectiveError" and "RuntimeError" in seen.bases, f"rank {rank}: {seen.kind}\n{seen.trace}"
    assert all(part.strip() for part in seen.parts), seen.parts
    for words in says:
        assert re.search(words, seen.text), f"rank {rank}: {words!r} is not in: {seen.text}"


def _shared_memory_files() -> set[str]:
    return {path.name for path in Path("/dev/shm").glob("npuzero*")}
