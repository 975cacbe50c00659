"""A rank of a pipeline dies: the ranks of all stages get a CollectiveError soon, and leave nothing behind."""

from __future__ import annotations

import pytest

from faults import dead_stages
from faults.fault_ranks import run_faulty_ranks

from .test_dead_ranks import CULPRIT, check_others_know, nothing_left

__all__ = ["nothing_left"]

pytestmark = pytest.mark.world


@pytest.mark.parametrize(
    ("plan", "where", "schedule", "data"),
    [
        ("zero2", "forward", "1f1b", 1),
        ("zero3", "backward", "1f1b", 2),
        ("zero0", "R3", "1f1b", 2),
        pytest.param("zero3", "forward", "interleaved", 2, marks=pytest.mark.slow),
        pytest.param("zero0", "backward", "gpipe", 1, marks=pytest.mark.slow),
        pytest.param("zero2", "update", "zero-bubble", 2, marks=pytest.mark.slow),
    ],
)
def test_killed(plan: str, where: str, schedule: str, data: int) -> None:
    outcomes = run_faulty_ranks(dead_stages.killed_stage, dead_stages.STAGES * data, plan, where, schedule)
    assert outcomes[CULPRIT].exit_code == -9
    # A waiting rank names the culprit; where such a rank has ended in turn, the error names that rank.
    check_others_know(outcomes, r"rank \d (is dead|has ended|aborted)")
    assert any(f"rank {CULPRIT} is dead" in outcome.seen.text for outcome in outcomes if outcome.seen is not None)
    if where in {"forward", "backward"}:  # the waiting rank names the stages of the send, and its purpose
        assert any(" tagged 'stage " in outcome.seen.text for outcome in outcomes if outcome.seen is not None)
