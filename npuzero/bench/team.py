"""Ranks in separate processes, one team per contender, so that contenders from different environments interleave.

A worker answers each line of JSON with one line (see worker.py). Between turns it waits without using a core. A worker
that dies, fails or exceeds the timeout ends the full team; the error contains the end of its stderr.
"""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import IO, Any

from npuzero import config
from npuzero.bench.harness import Contender
from npuzero.errors import BenchmarkError

_TAIL_BYTES = 4000
_QUIT_S = 10.0


def python_worker(source: str | Path, python: str | Path = sys.executable) -> list[str]:
    """Return the command line of a worker, run by ``python``, with its work from ``source`` (a file or module name).

    The environment of ``python`` need not have npuzero.
    """
    return [str(python), str(Path(__file__).with_name("worker.py")), str(source)]


class Team:
    """Run the ranks of one contender. Use it as a context manager.

    The ranks find torch.distributed's variables (RANK, WORLD_SIZE, MASTER_ADDR...) in their environment.

    Args:
        name: the contender's.
        command: starts one worker.
        options: JSON values passed to its ``make``.
        threads: of each rank (OMP_NUM_THREADS).
        variables: further environment variables.
        timeout_s: maximum seconds per answer; ``start_s``: for starting.

    Raises:
        BenchmarkError: a worker could not be started, died, failed, or did not answer in time.
    """

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        ranks: int,
        *,
        options: Mapping[str, Any] | None = None,
        threads: int = 1,
        variables: Mapping[str, str] | None = None,
        timeout_s: float = 120.0,
        start_s: float = 180.0,
    ) -> None:
        self.name = name
        self.ranks = ranks
        self._command = list(command)
        self._options = dict(options or {})
        self._variables = {"OMP_NUM_THREADS": str(threads), **(variables or {})}
        self._timeout_s = timeout_s
        self._start_s = start_s
        self._workers: list[subprocess.Popen[bytes]] = []
        self._errors: list[IO[bytes]] = []
        self._pending: list[bytes] = []

    def __enter__(self) -> Team:
        try:
            self._start()
        except BaseException:
            self._end()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close(orderly=kind is None)

    def run(self, count: int) -> list[float]:
        """Return the seconds per call of each rank, over ``count`` calls."""
        return [float(value) for value in self._tell({"do": "run", "count": count})]

    def ask(self, what: str, **arguments: Any) -> list[Any]:
        """Call the method ``what`` of each rank's work and return the answers."""
        return self._tell({"do": what, "arguments": arguments})

    def memory(self) -> list[dict[str, Any]]:
        """Return the resident bytes of each rank: before making the work, now, and at peak; see worker.read_memory."""
        return self._tell({"do": "memory"})

    def contender(self, nbytes: int | None = None) -> Contender:
        """Make this team a contender of a benchmark, timed by its slowest rank."""
        return Contender(self.name, lambda count: max(self.run(count)), nbytes)

    def close(self, *, orderly: bool = True) -> None:
        """End the ranks; kill any that do not exit. Idempotent."""
        try:
            if orderly and self._workers:
                self._tell({"do": "quit"}, _QUIT_S)
        finally:
            self._end()

    def _start(self) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        for rank in range(self.ranks):
            facts = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": self.ranks, "LOCAL_WORLD_SIZE": self.ranks}
            variables = {key: str(value) for key, value in facts.items()} | {
                "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), **self._variables
            }  # fmt: skip
            self._errors.append(tempfile.TemporaryFile())  # noqa: SIM115  closed by _end
            self._pending.append(b"")
            try:
                worker = subprocess.Popen(
                    self._command,
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=self._errors[-1],
                    env=config.build_child_environment(variables),
                    start_new_session=True,  # to be killed together with its children
                )
            except OSError as error:
                raise self._failure(rank, "a worker that starts", str(error)) from error
            self._workers.append(worker)
        self._say([{"rank": rank, "size": self.ranks, "options": self._options} for rank in range(self.ranks)])
        self._hear(self._start_s)

    def _tell(self, line: dict[str, Any], timeout_s: float | None = None) -> list[Any]:
        """Send one line to every rank and wait for the answers. An error ends the team."""
        try:
            self._say([line] * self.ranks)
            return self._hear(timeout_s or self._timeout_s)
        except BaseException:
            self._end()
            raise

    def _say(self, lines: Sequence[dict[str, Any]]) -> None:
        for rank, (worker, line) in enumerate(zip(self._workers, lines, strict=True)):
            assert worker.stdin is not None
            try:
                worker.stdin.write(json.dumps(line).encode() + b"\n")
                worker.stdin.flush()
            except OSError:
                raise self._ended(rank) from None

    def _hear(self, timeout_s: float) -> list[Any]:
        """Read one answer from every rank."""
        answers: dict[int, Any] = {}
        deadline = time.monotonic() + timeout_s
        with selectors.DefaultSelector() as selector:
            for rank, worker in enumerate(self._workers):
                assert worker.stdout is not None
                selector.register(worker.stdout, selectors.EVENT_READ, rank)
            while len(answers) < self.ranks:
                ready = selector.select(max(0.0, deadline - time.monotonic()))
                if not ready:
                    silent = next(rank for rank in range(self.ranks) if rank not in answers)
                    raise self._failure(silent, f"an answer within {timeout_s:g} s", "silence")
                for key, _ in ready:
                    rank = key.data
                    line = self._read_line(rank)
                    if line is not None:
                        answers[rank] = self._answer(rank, line)
                        selector.unregister(key.fileobj)
        return [answers[rank] for rank in range(self.ranks)]

    def _read_line(self, rank: int) -> bytes | None:
        """Return the next line if it is complete."""
        stream = self._workers[rank].stdout
        assert stream is not None
        piece = os.read(stream.fileno(), 1 << 16)
        if not piece:
            raise self._ended(rank)
        self._pending[rank] += piece
        line, newline, rest = self._pending[rank].partition(b"\n")
        if not newline:
            return None
        self._pending[rank] = rest
        return line

    def _answer(self, rank: int, line: bytes) -> Any:
        try:
            said = json.loads(line)
        except ValueError:
            raise self._failure(rank, "a line of JSON", repr(line[:200])) from None
        if "error" in said:
            raise self._failure(rank, "an answer", said["error"])
        return said["answer"]

    def _ended(self, rank: int) -> BenchmarkError:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._workers[rank].wait(_QUIT_S)
        return self._failure(rank, "a worker that answers", f"its end, with status {self._workers[rank].returncode}")

    def _failure(self, rank: int, expected: str, got: str) -> BenchmarkError:
        errors = self._errors[rank]
        errors.flush()
        size = os.fstat(errors.fileno()).st_size
        tail = os.pread(errors.fileno(), _TAIL_BYTES, max(0, size - _TAIL_BYTES)).decode(errors="replace").strip()
        said = f"Its stderr ends:\n{tail}" if tail else "It wrote nothing to stderr."
        return BenchmarkError(
            f"team {self.name!r}, rank {rank}", expected=expected, got=got, do=said, team=self.name, rank=rank
        )

    def _end(self) -> None:
        for worker in self._workers:
            with contextlib.suppress(ProcessLookupError):
                if worker.poll() is None:
                    os.killpg(worker.pid, signal.SIGKILL)
            worker.wait()
            for pipe in (worker.stdin, worker.stdout):
                assert pipe is not None
                with contextlib.suppress(OSError):
                    pipe.close()
        for errors in self._errors:
            errors.close()
        self._workers, self._errors, self._pending = [], [], []
