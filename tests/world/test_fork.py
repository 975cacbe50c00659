"""Ranks that fork during training: children end cleanly, and training has the bits of a run without forks."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.world

ROOT = Path(__file__).parents[2]
PROGRAM = Path(__file__).parent / "forking.py"
LIMIT_S = 120.0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("door", "preset"), [("init", "zero0"), ("init", "zero2"), ("init", "zero3"), ("gloo", "zero3"), ("shm", "zero1")]
)
def test_ranks_that_fork_in_training(door: str, preset: str) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    paths = os.pathsep.join([str(ROOT / "tests"), os.environ.get("PYTHONPATH", "")])
    launch = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    ranks = [
        subprocess.Popen(
            [sys.executable, str(PROGRAM), door, preset],
            env={**os.environ, **launch, "RANK": str(rank), "LOCAL_RANK": str(rank), "PYTHONPATH": paths},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        outputs = [rank.communicate(timeout=LIMIT_S)[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    for rank, output in zip(ranks, outputs, strict=True):
        assert rank.returncode == 0 and output.split()[-1:] == ["trained"], output
        assert "Error" not in output, output
