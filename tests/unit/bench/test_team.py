"""Teams: ranks that answer, and ranks that die, fail, hang or talk nonsense."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from npuzero.bench import Team, python_worker
from npuzero.errors import BenchmarkError

WORKER = python_worker(Path(__file__).with_name("workers.py"))


def is_process_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def test_every_rank_runs_and_answers():
    with Team("t", WORKER, 2, threads=3, variables={"EXTRA": "x"}) as team:
        assert [time > 0 for time in team.run(4)] == [True, True]
        assert team.contender(nbytes=8).visit(1) > 0
        assert team.ask("told", factor=10) == [[10 * rank, 5, 2, str(rank), "2", "3", "x"] for rank in range(2)]


def test_memory_counts_from_before_the_work_was_made():
    with Team("t", WORKER, 1) as team:
        (before,) = team.memory()
        team.ask("hold", count=64 << 20)
        (after,) = team.memory()
    assert before["baseline_bytes"] == after["baseline_bytes"] <= before["now_bytes"]
    assert 60 << 20 < after["peak_bytes"] - before["now_bytes"] < 90 << 20


@pytest.mark.parametrize(
    ("how", "got"),
    [("raises", "ValueError: no such thing"), ("dies", "its end, with status 3"), ("hangs", "silence")],
)
def test_a_rank_that_fails_ends_the_team_with_its_last_words(how, got):
    with (
        pytest.raises(BenchmarkError) as caught,
        Team("t", WORKER, 2, options={"how": how, "fails": 1}, timeout_s=2.0) as team,
    ):
        processes = team.ask("pid")
        team.run(1)
    assert got in caught.value.got and caught.value.facts == {"team": "t", "rank": 1}
    assert "what it said last" in caught.value.do
    assert not any(map(is_process_alive, processes))


@pytest.mark.parametrize(
    ("command", "got"),
    [
        (["no-such-program"], "No such file"),
        ([sys.executable, "-c", "import sys; sys.exit('nothing to do')"], "its end, with status 1"),
        ([sys.executable, "-c", "print('hello', flush=True); input()"], "b'hello'"),
        (python_worker("no.such.module"), "ModuleNotFoundError"),
    ],
)
def test_a_worker_that_does_not_get_ready_is_an_error(command, got):
    with pytest.raises(BenchmarkError) as caught, Team("t", command, 1, start_s=30.0):
        pass
    assert got in caught.value.got


def test_work_that_cannot_be_made_is_an_error():
    with pytest.raises(BenchmarkError, match="cannot be made"), Team("t", WORKER, 1, options={"how": "unmade"}):
        pass


def test_a_team_leaves_nothing_behind():
    with Team("t", WORKER, 2) as team:
        processes = team.ask("pid")
    assert not any(map(is_process_alive, processes))
