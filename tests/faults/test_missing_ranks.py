"""Ranks that never join: waiting ranks name the missing ones, soon in a warning, at the timeout in their error."""

from __future__ import annotations

import os
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch.distributed as dist

pytestmark = pytest.mark.world

TIMEOUT_S = 8.0
RANKS = 3

#: The program of a process: the action of each rank before it joins.
PROGRAM = """
import os, sys, time
from pathlib import Path
import npuzero
Path("ready" + os.environ["RANK"]).touch()
while len([*Path(".").glob("ready*")]) < {ranks}:  # imports take long, and not equally
    time.sleep(0.02)
if os.environ["RANK"] in {ends}:
    sys.exit()
if {torch}:
    import torch.distributed as dist
    dist.init_process_group("gloo")
if os.environ["RANK"] in {stays}:
    time.sleep(60)
npuzero.init("cpu", timeout_s={timeout_s})
"""


def _run_missing_ranks(
    tmp_path: Path, agent: bool, ends: str = "", stays: str = "", torch: bool = False
) -> list[tuple[str, int]]:
    """Return the stderr of the ranks that join, and every rank's process."""
    program = tmp_path / "program.py"
    program.write_text(PROGRAM.format(ends=[*ends], stays=[*stays], torch=torch, ranks=RANKS, timeout_s=TIMEOUT_S))
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    port = store.port
    if not agent:
        del store  # the port is free again
    told = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(RANKS)}
    told["TORCHELASTIC_USE_AGENT_STORE"] = str(agent)
    with ExitStack() as stack:
        processes = []
        for rank in range(RANKS):
            variables = {**os.environ, **told, "RANK": str(rank)}
            command = [sys.executable, str(program)]
            process = subprocess.Popen(command, env=variables, cwd=tmp_path, stderr=subprocess.PIPE, text=True)
            processes.append(stack.enter_context(process))
            stack.callback(process.kill)
        return [
            ("" if str(rank) in ends + stays else process.communicate(timeout=TIMEOUT_S + 60)[1], process.pid)
            for rank, process in enumerate(processes)
        ]


@pytest.mark.parametrize("torch", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_ranks_that_have_not_joined_are_named(tmp_path: Path, torch: bool) -> None:
    """Also if the program has started torch.distributed on all ranks, but npuzero on some only."""
    found = _run_missing_ranks(tmp_path, agent=True, stays="1", torch=torch)
    where = f"2 of 3 ranks have joined, and wait for rank 1; rank 1 runs on this host, in process {found[1][1]}"
    for rank in (0, 2):
        text = found[rank][0]
        error = text.index("CollectiveError: init")
        assert text.count("RuntimeWarning: npuzero.init() at program.py:15 has waited for ") == 1
        assert where in text[:error] and where in text[error:]
        assert "npuzero.init() on every rank, since it is collective" in text[error:]


@pytest.mark.slow
def test_a_rank_that_ended_before_it_joined_is_seen_to_be_gone(tmp_path: Path) -> None:
    found = _run_missing_ranks(tmp_path, agent=True, ends="2")
    for rank in (0, 1):
        assert "wait for rank 2; no process of rank 2 is to be seen on this host" in found[rank][0]


@pytest.mark.slow
@pytest.mark.parametrize("absent", ["0", "1"])
def test_ranks_are_named_where_one_of_them_keeps_the_store(tmp_path: Path, absent: str) -> None:
    found = _run_missing_ranks(tmp_path, agent=False, stays=absent)
    says = "where rank 0 keeps the ranks' store" if absent == "0" else "have joined, and wait for rank 1;"
    for rank in {0, 1, 2} - {int(absent)}:
        text = found[rank][0]
        assert says in text[: text.index("CollectiveError: init")], text
        assert says in text[text.index("CollectiveError: init") :], text
