"""Provoke faults outside the test process, which survives crashes and hangs.

A case runs in a separate process on ranks that are threads (:func:`provoke`), or on one process per rank
(:func:`run_faulty_ranks`). Both have a hard time limit and report the error of every rank.
"""

from __future__ import annotations

import faulthandler
import importlib
import multiprocessing
import os
import time
import traceback
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

import npuzero
from npuzero.comm import run_threads

# Children fork from a process that has imported torch (and the modules that optimizers import at their first step) and
# has computed nothing: they start fast, and have none of torch's threads.
_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(["torch", "torch.distributed", "torch._dynamo", "npuzero"])

LIMIT_S = 150.0


@dataclass(frozen=True)
class SeenError:
    """Describe a rank's error for transport: ``kind`` and its bases by name, and three parts if it is npuzero's."""

    kind: str = ""
    bases: tuple[str, ...] = ()
    text: str = ""
    parts: tuple[str, str, str] = ("", "", "")
    facts: dict[str, str] = field(default_factory=dict)
    trace: str = ""
    after_s: float = 0.0


@dataclass
class ProcessOutcome:
    """Describe the end of a process: the value it returned as ``seen``; ``exit_code`` is None where it hung."""

    seen: Any = None
    exit_code: int | None = None
    ended_s: float = 0.0


class FaultProvoker:
    """Run rows of the table one after another in a process, which is replaced after a row that kills or hangs it."""

    def __init__(self) -> None:
        self._pipe: Any = None
        self._child: Any = None

    def provoke(self, name: str) -> list[SeenError]:
        """Return the error of each rank in the row ``name``; fail if the process crashes or hangs."""
        if self._child is None:
            self._pipe, theirs = _context.Pipe()
            self._child = _context.Process(target=_serve_rows, args=(theirs,), daemon=True)
            self._child.start()
            theirs.close()
        self._pipe.send(name)
        try:
            if self._pipe.poll(LIMIT_S):
                return list(self._pipe.recv())
            verdict = f"it hung for {LIMIT_S} s"
        except EOFError:
            self._child.join(1.0)
            verdict = f"it ended with {self._child.exitcode}"
        self.close()
        raise AssertionError(f"what became of the process: {verdict}")

    def close(self) -> None:
        """End the process."""
        if self._child is not None:
            self._child.kill()
            self._child.join()
            self._child = None


def run_faulty_ranks(
    fault: Callable[..., object],
    ranks: int,
    *args: Any,
    timeout_s: float = 10.0,
    backend: str | None = None,
    agent: bool = True,
) -> list[ProcessOutcome]:
    """Run ``fault(world, *args)`` on ``ranks`` processes that join by ``npuzero.init()`` as torchrun starts them.

    ``agent``: a separate process keeps the store, as torchrun's agent does; else rank 0 keeps it, as under mpirun.
    """
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    port = store.port
    if not agent:
        del store  # the port is free again
    setup = (ranks, port, agent, timeout_s, backend)
    return _run_processes([(_run_on_process, (rank, setup, fault, args)) for rank in range(ranks)])


def catch_fault(fault: Callable[..., object], *args: Any) -> SeenError:
    """Call ``fault`` and report its error."""
    begin_s = time.monotonic()
    try:
        fault(*args)
        return SeenError(after_s=time.monotonic() - begin_s)
    except BaseException as error:
        ours = isinstance(error, npuzero.NpuZeroError)
        return SeenError(
            type(error).__name__,
            tuple(base.__name__ for base in type(error).__mro__),
            str(error),
            (error.expected, error.got, error.do) if ours else ("", "", ""),
            {key: str(value) for key, value in error.facts.items()} if ours else {},
            traceback.format_exc(),
            time.monotonic() - begin_s,
        )


def _run_processes(bodies: list[tuple[Callable[..., Any], tuple[Any, ...]]]) -> list[ProcessOutcome]:
    children, pipes = [], []
    for body, args in bodies:
        ours, theirs = _context.Pipe(duplex=False)
        child = _context.Process(target=_run_child, args=(theirs, body, args), daemon=True)
        child.start()
        theirs.close()
        children.append(child)
        pipes.append(ours)
    outcomes = [ProcessOutcome() for _ in children]
    deadline = time.monotonic() + LIMIT_S
    open_pipes = dict(zip(pipes, outcomes, strict=True))
    while open_pipes and (left_s := deadline - time.monotonic()) > 0:
        for pipe in wait(list(open_pipes), left_s):
            outcome = open_pipes[pipe]
            try:
                outcome.seen = pipe.recv()  # type: ignore[union-attr]
            except EOFError:
                del open_pipes[pipe]
            outcome.ended_s = time.monotonic()
    for child, outcome in zip(children, outcomes, strict=True):
        child.join(max(0.1, deadline - time.monotonic()))
        hangs = child.is_alive()
        child.kill()
        child.join()
        outcome.exit_code = None if hangs else child.exitcode
    return outcomes


def _run_child(pipe: Connection, body: Callable[..., Any], args: tuple[Any, ...]) -> None:
    _prepare_process()
    pipe.send(body(*args))


def _prepare_process() -> None:
    faulthandler.enable()  # prints each thread's stack if a signal ends the process
    warnings.simplefilter("error")
    torch.set_num_threads(1)


def _serve_rows(pipe: Connection) -> None:
    # Rows are unnamed functions, which cannot be pickled: the child looks them up here.
    cases = importlib.import_module("faults.bad_inputs.table").CASES
    _prepare_process()
    while True:
        case = cases[pipe.recv()]
        with mock.patch.dict(os.environ):
            pipe.send(run_threads(case.ranks, lambda world: catch_fault(case.provoke, world), timeout_s=10.0))  # noqa: B023


def _run_on_process(
    rank: int, setup: tuple[Any, ...], fault: Callable[..., object], args: tuple[Any, ...]
) -> SeenError:
    ranks, port, agent, timeout_s, backend = setup
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(ranks), LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE=str(ranks))
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), TORCHELASTIC_USE_AGENT_STORE=str(agent))
    return catch_fault(lambda: fault(npuzero.init("cpu", timeout_s=timeout_s, backend=backend), *args))
