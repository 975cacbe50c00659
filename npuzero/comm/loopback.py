"""Ranks as threads of one process: the same collectives over plain memory, for tests and for trying things out."""

from __future__ import annotations

import json
import threading
import time
from collections import Counter
from collections.abc import Callable
from typing import Any, TypeVar

import torch

from npuzero import observe
from npuzero.comm import shared_memory
from npuzero.comm.communicator import Communicator
from npuzero.comm.world import World, entered
from npuzero.errors import CollectiveError

_Result = TypeVar("_Result")


class _Meeting:
    """What the threads of one run share."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.changed = threading.Condition()
        self.regions: dict[tuple[tuple[int, ...], str], Any] = {}
        self.exchanges: dict[tuple[str, int], dict[int, str]] = {}
        self.aborted: tuple[int, str] | None = None  # by which rank, and why
        self.left: set[int] = set()
        self.first_error: BaseException | None = None

    def region(self, ranks: tuple[int, ...], name: str) -> Any:
        """The region of a group: a new one knows of ranks that aborted or left before it was made."""
        with self.changed:
            region = self.regions.get((ranks, name))
            if region is None:
                region = shared_memory.native.Region.in_threads(len(ranks), shared_memory.SLOT_BYTES)
                self.regions[ranks, name] = region
                if self.aborted is not None:
                    region.abort(*self.aborted)
                for rank in self.left.intersection(ranks):
                    region.leave(ranks.index(rank))
            return region

    def abort(self, rank: int, reason: str) -> None:
        """Breaks every communicator there is and will be; only the first reason counts."""
        with self.changed:
            self.aborted = self.aborted or (rank, reason)
            for region in self.regions.values():
                region.abort(*self.aborted)
            self.changed.notify_all()

    def leave(self, rank: int) -> None:
        """Lets nobody wait for ``rank`` any more, also where it never opened the communicator."""
        with self.changed:
            self.left.add(rank)
            for (ranks, _), region in self.regions.items():
                if rank in ranks:
                    region.leave(ranks.index(rank))
            self.changed.notify_all()


class ThreadWorld(World):
    """One rank of ``run_threads``."""

    def __init__(self, rank: int, meeting: _Meeting, timeout_s: float) -> None:
        super().__init__(rank, meeting.size, torch.device("cpu"), range(meeting.size), timeout_s)
        self._meeting = meeting
        self._exchanges: Counter[str] = Counter()

    def exchange(self, value: object, channel: str = "") -> list[Any]:
        self._check_birthplace("exchange")
        meeting = self._meeting
        self._exchanges[channel] += 1
        number = self._exchanges[channel]
        with meeting.changed:
            values = meeting.exchanges.setdefault((channel, number), {})
            values[self.rank] = json.dumps(value)
            meeting.exchanges.pop((channel, number - 2), None)
            meeting.changed.notify_all()
            met = meeting.changed.wait_for(
                lambda: len(values) == self.size or meeting.aborted or meeting.left - values.keys(), self.timeout_s
            )
            if len(values) < self.size:
                why = "rank {} aborted: {}".format(*meeting.aborted) if meeting.aborted else "the others ended"
                raise CollectiveError(
                    f"exchange #{number}{channel and f' of {channel}'} on rank {self.rank}",
                    expected=f"all {self.size} ranks within {self.timeout_s} s",
                    got=f"ranks {sorted(values)} alone" + (f": {why}" if met else ""),
                    do="See the error of the first rank that failed, or what the others do.",
                )
        return [json.loads(values[rank]) for rank in range(self.size)]

    def abort(self, reason: str) -> None:
        if self.inherited:
            return
        self._meeting.abort(self.rank, reason)
        super().abort(reason)

    def close(self) -> None:
        if self.inherited:
            return
        self._meeting.leave(self.rank)
        super().close()

    def _make(self, ranks: tuple[int, ...], name: str) -> Communicator:
        region = self._meeting.region(ranks, name)
        return shared_memory.SharedMemoryCommunicator(
            region, ranks, ranks.index(self.rank), name, pids=(), timeout_s=self.timeout_s
        )


def run_threads(
    size: int, fn: Callable[[World], _Result], *, timeout_s: float = 60.0, limit_s: float | None = None
) -> list[_Result]:
    """Runs ``fn(world)`` on ``size`` ranks, each a thread, and returns what each returned, by rank.

    Inside, ``current_world()`` is the rank's world. The first exception ends the others' waiting and is raised here.

    Args:
        timeout_s: seconds a collective may wait.
        limit_s: seconds for all of it; None: ten times ``timeout_s``.

    Raises:
        CollectiveError: the ranks did not end within ``limit_s``.
    """
    limit_s = 10 * timeout_s if limit_s is None else limit_s
    meeting = _Meeting(size)
    worlds = [ThreadWorld(rank, meeting, timeout_s) for rank in range(size)]
    results: dict[int, _Result] = {}

    def body(world: ThreadWorld) -> None:
        observe.set_rank(world.rank)
        try:
            with entered(world):
                results[world.rank] = fn(world)
                world.drain()
        except BaseException as error:
            with meeting.changed:
                meeting.first_error = meeting.first_error or error
            world.abort(f"{type(error).__name__}: {error}")
        finally:
            world.close()

    threads = [threading.Thread(target=body, args=(world,), name=f"rank {world.rank}", daemon=True) for world in worlds]
    for thread in threads:
        thread.start()
    try:
        stuck = _join(threads, limit_s)
    except BaseException as error:
        meeting.abort(0, type(error).__name__)
        raise
    if stuck:
        meeting.abort(0, f"not done after {limit_s} s")
        raise CollectiveError(
            "run_threads",
            expected=f"{size} ranks to end within {limit_s} s",
            got=f"{', '.join(stuck)} still running",
            do="See what they do, or raise limit_s.",
        ) from meeting.first_error
    if meeting.first_error is not None:
        raise meeting.first_error
    return [results[rank] for rank in range(size)]


def _join(threads: list[threading.Thread], timeout_s: float) -> list[str]:
    """Names of the threads that still run after ``timeout_s``."""
    deadline = time.monotonic() + timeout_s
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))
    return [thread.name for thread in threads if thread.is_alive()]
