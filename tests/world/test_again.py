"""Joining again, and a store that ends before its ranks."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from faults.fault_ranks import run_faulty_ranks
from world import again

pytestmark = pytest.mark.world


def _check_ended_well(outcomes: list[Any], but: int | None = None) -> None:
    for rank, outcome in enumerate(outcomes):
        if rank != but:
            assert outcome.seen is not None, f"rank {rank} ended with {outcome.exit_code} (None: it hung)"
            assert outcome.seen.kind == "", f"rank {rank}:\n{outcome.seen.trace}"
            assert outcome.exit_code == 0


@pytest.mark.parametrize(
    ("ranks", "rounds", "backend"),
    [
        (2, 4, None),
        pytest.param(3, 12, None, marks=pytest.mark.slow),
        pytest.param(3, 4, "gloo", marks=pytest.mark.slow),
    ],
)
def test_init_train_close_and_init_again(ranks: int, rounds: int, backend: str | None) -> None:
    _check_ended_well(run_faulty_ranks(again.leaves_and_joins_again, ranks, rounds, backend, backend=backend))


def test_a_second_init_gives_the_same_world() -> None:
    _check_ended_well(run_faulty_ranks(again.joins_twice, 2))


def test_a_second_init_with_other_wishes_is_an_error() -> None:
    _check_ended_well(run_faulty_ranks(again.joins_otherwise, 2))


@pytest.mark.slow
def test_who_keeps_the_store_ends_after_the_others(tmp_path: Path) -> None:
    """All do the same; rank 0 ends first, and its process keeps the store."""
    program = tmp_path / "rank.py"
    program.write_text(
        "import time, npuzero\n"
        "world = npuzero.init('cpu', timeout_s=20)\n"
        "if world.rank:\n"
        "    get = world._store.get\n"
        "    world._store.get = lambda key: time.sleep(1.5) or get(key)\n"
        "assert world.exchange(world.rank) == [0, 1]\n"
    )
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    meeting = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    ranks = [
        subprocess.Popen(
            [sys.executable, program],
            env={**os.environ, **meeting, "RANK": str(rank)},
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    for rank in ranks:
        _, errors = rank.communicate(timeout=300)
        assert rank.returncode == 0, errors


SLOW = [pytest.param(then, marks=pytest.mark.slow) for then in ("a new communicator", "a save", "init")]


@pytest.mark.parametrize("then", ["exchange", *SLOW])
def test_the_store_ends_with_rank_0(then: str) -> None:
    """Every remaining rank learns which rank kept the store, where, and what to do."""
    _check_ended_well(run_faulty_ranks(again.keeper_ends, 3, then, agent=False), but=0)
