"""Ranks restarted by torchrun join each other, in spite of earlier ranks' entries in its agent's store."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.world, pytest.mark.slow]

#: In its first three lives one rank ends as soon as it has joined; in the last of them, before it joins.
PROGRAM = r"""
import os
import npuzero, torch
life, rank = int(os.environ["TORCHELASTIC_RESTART_COUNT"]), int(os.environ["RANK"])
if (life, rank) == (2, 1):
    os._exit(1)
world = npuzero.init("cpu", timeout_s=30)
print(f"life {life}, rank {rank}: {world.mean(torch.tensor(float(rank))).item()}\n", end="", flush=True)  # one write
if life < 2 and rank == 1:
    os._exit(1)
world.mean(torch.ones(()))
"""


def test_each_life_of_the_ranks_meets(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "--max-restarts", "3"]
    ended = subprocess.run(
        [sys.executable, *torchrun, str(program)],
        env={**os.environ, "OMP_NUM_THREADS": "1"}, text=True, timeout=300,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    assert ended.returncode == 0, ended.stdout[-4000:]
    said = {line for line in ended.stdout.splitlines() if line.startswith("life ")}
    assert said == {f"life {life}, rank {rank}: 0.5" for life in (0, 1, 3) for rank in (0, 1)}
