"""Start ranks as processes, with a hard time limit, and report the outcome of each."""

from __future__ import annotations

import multiprocessing
import os
import time
import traceback
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from npuzero import comm
from npuzero.comm.backends import shared_memory

# Children fork from a process that has imported torch once and computed nothing: fast, without inherited threads.
context = multiprocessing.get_context("forkserver")
# torch.distributed and its optimizers import torch._dynamo when first used, which takes seconds in each process.
context.set_forkserver_preload(["torch", "torch.distributed", "torch._dynamo", "npuzero.comm"])

#: Small slots, so that small tensors take several rounds.
SLOT_BYTES = 4096


@dataclass
class RankOutcome:
    """A rank's outcome: `value` or `error`, neither if it died; `exit_code`; its end (time.monotonic)."""

    value: Any = None
    error: BaseException | None = None
    trace: str = ""
    exit_code: int | None = None
    ended_s: float = 0.0


def run_comm_ranks(
    size: int,
    fn: Callable[..., Any],
    *args: Any,
    folder: Path,
    backend: str | None = None,
    timeout_s: float = 30.0,
    limit_s: float = 300.0,
    slot_bytes: int = SLOT_BYTES,
) -> list[RankOutcome]:
    """Run `fn(world, *args)` on `size` processes that join in `folder`. Kill every process after `limit_s`."""
    meeting = f"file://{folder}/meeting-{time.monotonic_ns()}"
    children, pipes = [], []
    for rank in range(size):
        ours, theirs = context.Pipe(duplex=False)
        setup = (rank, size, meeting, backend, timeout_s, slot_bytes)
        child = context.Process(target=run_rank_body, args=(theirs, setup, fn, args), daemon=True)
        child.start()
        theirs.close()
        children.append(child)
        pipes.append(ours)
    outcomes = [RankOutcome() for _ in range(size)]
    deadline = time.monotonic() + limit_s
    open_pipes = dict(zip(pipes, outcomes, strict=True))
    while open_pipes and time.monotonic() < deadline:
        for pipe in wait(list(open_pipes), deadline - time.monotonic()):
            _receive_outcome(pipe, open_pipes)
    for child, outcome in zip(children, outcomes, strict=True):
        child.join(max(0.1, deadline - time.monotonic()))
        hangs = child.is_alive()
        child.kill()
        child.join()
        outcome.exit_code = None if hangs else child.exitcode
    return outcomes


def rank_results(outcomes: list[RankOutcome]) -> list[Any]:
    """Return the ranks' results; fail if a rank did not end well."""
    for rank, outcome in enumerate(outcomes):
        assert outcome.error is None, f"rank {rank}:\n{outcome.trace}"
        assert outcome.exit_code == 0, f"rank {rank} ended with {outcome.exit_code} (None: it hung and was killed)"
    return [outcome.value for outcome in outcomes]


def _receive_outcome(pipe: Any, open_pipes: dict[Any, RankOutcome]) -> None:
    try:
        kind, *content = pipe.recv()
    except EOFError:
        del open_pipes[pipe]
        return
    outcome = open_pipes[pipe]
    outcome.ended_s = time.monotonic()
    if kind == "value":
        (outcome.value,) = content
    else:
        outcome.error, outcome.trace = content


def run_rank_body(pipe: Connection, setup: tuple[Any, ...], fn: Callable[..., Any], args: tuple[Any, ...]) -> None:
    """Run a rank; it joins by a file, or by a store on this port."""
    rank, size, meeting, backend, timeout_s, shared_memory.SLOT_BYTES = setup
    warnings.simplefilter("error")
    torch.set_num_threads(1)
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(size), LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE=str(size))
    where: dict[str, Any] = {"init_method": meeting}
    if isinstance(meeting, int):
        os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "True"  # no rank keeps the store
        where = {"store": dist.TCPStore("127.0.0.1", meeting, is_master=False)}
    dist.init_process_group("gloo", rank=rank, world_size=size, **where)
    dist.distributed_c10d._get_default_store().set_timeout(timedelta(seconds=timeout_s))
    try:
        world = comm.process_world("cpu", timeout_s=timeout_s, backend=backend)
        pipe.send(("value", fn(world, *args)))
    except BaseException as error:
        pipe.send(("error", error, traceback.format_exc()))
