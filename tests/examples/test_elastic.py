"""The elastic example: a node is killed in mid-run, training goes on without it, takes it back, and loses nothing."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from examples.pages import ROOT, run_script

pytestmark = pytest.mark.world

SCRIPT = ROOT / "examples" / "elastic" / "train.py"
STEPS, EVERY = 150, 5
#: Of the losses of each step, on any ranks and however often it was taken; docs/elastic.md says the same.
BOUND = 1e-5
WAIT_S = 180
#: An agent that is killed is missed after six seconds, on a machine that may be busy; then others start after three.
SOON = "last_call_timeout=3,keep_alive_interval=2,keep_alive_max_attempt=3"
#: A namespace of process ids for each node keeps their ranks from sharing memory, as on two machines. It takes root.
APART = ["unshare", "--pid", "--fork", "--kill-child", "--mount-proc"]
needs_root = pytest.mark.skipif(
    os.geteuid() != 0 or shutil.which("unshare") is None, reason="namespaces for the nodes take root and unshare"
)


def read_elastic_steps(out: Path) -> list[dict[str, Any]]:
    """What rank 0 has written down of each step, in order, steps that were taken again as well."""
    path = out / "steps.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


class ElasticNodes:
    """Two nodes, each an agent of torchrun's with two ranks.

    Args:
        host: the node that keeps the store in which the agents meet, at ``port``; None: it is there.
        before: what a node's command begins with.
    """

    def __init__(self, out: Path, port: int, host: int | None, before: Sequence[str] = ()) -> None:
        self._out, self._port, self._host, self._before = out, port, host, before
        self.running: dict[int, subprocess.Popen[bytes]] = {}

    def start(self, node: int) -> None:
        variables = {"OMP_NUM_THREADS": "1", "NPUZERO_TIMEOUT_S": "60", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
        launcher = ["-m", "torch.distributed.run", "--nnodes", "1:2", "--nproc-per-node", "2", "--max-restarts", "5"]
        meeting = ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{self._port}", "--rdzv-id", "test"]
        meeting += ["--local-addr", f"127.0.0.{1 + node}", "--rdzv-conf"]
        meeting += [f"is_host={int(node == self._host)},{SOON}"]
        arguments = ["--steps", str(STEPS), "--every", str(EVERY), "--pause", "0.1", "--out", str(self._out)]
        with (self._out / f"{node}.log").open("ab") as log:
            self.running[node] = subprocess.Popen(
                [*self._before, sys.executable, *launcher, *meeting, str(SCRIPT), *arguments],
                env={**os.environ, **variables}, stdout=log, stderr=subprocess.STDOUT,
            )  # fmt: skip

    def __enter__(self) -> ElasticNodes:
        return self

    def __exit__(self, *_: object) -> None:
        for node in [*self.running]:
            self.kill(node)

    def kill(self, node: int) -> None:
        """End an agent and its ranks at once, as a machine ends that loses its power."""
        agent = self.running.pop(node)
        for process in (agent.pid, *child_processes(agent.pid)):
            with suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
        agent.wait()

    def until(self, met: Callable[[], bool]) -> None:
        """Wait; fail with the nodes' last words where it takes too long."""
        deadline_s = time.monotonic() + WAIT_S
        while not met():
            if time.monotonic() > deadline_s:
                said = {log.name: log.read_text()[-3000:] for log in self._out.glob("*.log")}
                pytest.fail(f"not within {WAIT_S} s; {said}")
            time.sleep(0.1)


def child_processes(parent: int) -> list[int]:
    """Processes that ``parent`` has started."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):  # it has just ended
            fields = path.read_text().rpartition(")")[2].split()  # behind the name: state, parent, ...
            found += [int(path.parent.name)] if int(fields[1]) == parent else []
    return found


@contextmanager
def store_process() -> Iterator[int]:
    """The port of a store in a process of its own, which no node's end ends."""
    command = [sys.executable, str(SCRIPT.with_name("store.py")), "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            yield int(process.stdout.readline().rpartition(":")[2])
        finally:
            process.kill()


def free_port() -> int:
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        return bound.getsockname()[1]


def kill_and_restart_node(run: ElasticNodes, out: Path, victim: int) -> None:
    """Kill a node in mid-run, wait until the other goes on, start it again, and wait for the end."""
    run.start(0)
    run.start(1)
    run.until(
        lambda: (
            bool(read_elastic_steps(out))
            and read_elastic_steps(out)[-1]["ranks"] == 4
            and read_elastic_steps(out)[-1]["step"] >= 20
        )
    )
    run.kill(victim)
    killed = read_elastic_steps(out)[-1]["step"]
    run.until(lambda: read_elastic_steps(out)[-1]["ranks"] == 2 and read_elastic_steps(out)[-1]["step"] >= killed + 5)
    first = read_elastic_steps(out)[-1]["first"]
    assert killed - 2 * EVERY <= first <= killed + 1, (
        "it goes on from the last checkpoint, which may just have been made"
    )
    run.start(victim)
    run.until(lambda: read_elastic_steps(out)[-1]["ranks"] == 4)
    assert read_elastic_steps(out)[-1]["first"] > killed
    for agent in run.running.values():
        run.until(lambda agent=agent: agent.poll() is not None)
        assert agent.returncode == 0


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    folder = tmp_path_factory.mktemp("undisturbed")
    run_script(SCRIPT, 4, folder, "--steps", str(STEPS), "--out", "out")
    return [line["loss"] for line in read_elastic_steps(folder / "out")]


@pytest.mark.slow
@pytest.mark.parametrize("victim", [1, pytest.param(0, marks=needs_root)])
def test_a_node_is_lost_and_comes_back(victim: int, undisturbed: list[float], tmp_path: Path) -> None:
    """The second node, over shared memory; and the first, over Gloo, with the store in neither."""
    if victim == 1:
        with ElasticNodes(tmp_path, free_port(), host=0) as run:
            kill_and_restart_node(run, tmp_path, victim)
    else:
        with store_process() as port, ElasticNodes(tmp_path, port, host=None, before=APART) as run:
            kill_and_restart_node(run, tmp_path, victim)
    found = read_elastic_steps(tmp_path)
    assert {line["step"] for line in found} == set(range(STEPS)), "every step was taken"
    assert [line["loss"] for line in found] == pytest.approx([undisturbed[line["step"]] for line in found], rel=BOUND)
    assert undisturbed[-1] < 0.5 * undisturbed[0]


@pytest.mark.slow
def test_ranks_take_the_same_steps_however_many_they_are(tmp_path: Path) -> None:
    alone, other = tmp_path / "alone", tmp_path / "other"
    few = ("--steps", "6", "--every", "3", "--out")
    run_script(SCRIPT, 1, tmp_path, *few, "alone")
    run_script(SCRIPT, 2, tmp_path, *few, "other")
    shutil.rmtree(other / "checkpoints" / "step-00000006")
    run_script(SCRIPT, 1, tmp_path, *few, "other")  # goes on from step 3, on another number
    assert [(line["step"], line["ranks"]) for line in read_elastic_steps(other)] == [
        *((step, 2) for step in range(6)), *((step, 1) for step in range(3, 6))
    ]  # fmt: skip
    losses = [line["loss"] for line in read_elastic_steps(alone)]
    assert [line["loss"] for line in read_elastic_steps(other)] == pytest.approx(losses + losses[3:], rel=BOUND)
