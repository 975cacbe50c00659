"""Run ranks as threads of one process: the same collectives over plain memory, for tests and experiments."""

from __future__ import annotations

import json
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch

from npuzero import observe
from npuzero.comm.backends import shared_memory
from npuzero.comm.communicator import Communicator
from npuzero.comm.joining import entered
from npuzero.comm.rendezvous.exchange_values import format_exchange_place, make_exchange_rendezvous
from npuzero.comm.watchdog.hang_detector import (
    NOWHERE,
    SLICE_S,
    CommunicatorFailure,
    RankStatus,
    WaitWatcher,
    make_abort_failure,
)
from npuzero.comm.world import World
from npuzero.errors import CollectiveError

_Result = TypeVar("_Result")


class _ThreadRun:
    """Hold the state that the threads of one run share."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.changed = threading.Condition()
        self.regions: dict[tuple[tuple[int, ...], str], Any] = {}
        self.exchanges: dict[tuple[str, int], dict[int, str]] = {}  # by place and number
        self.slots = [NOWHERE] * size
        self.failure: CommunicatorFailure | None = None
        self.left: set[int] = set()
        self.first_error: BaseException | None = None

    def region(self, ranks: tuple[int, ...], name: str) -> Any:
        """Return the region of a group; a new region gets the aborts and exits that came before it."""
        with self.changed:
            region = self.regions.get((ranks, name))
            if region is None:
                region = shared_memory.native.Region.in_threads(len(ranks), shared_memory.SLOT_BYTES)
                self.regions[ranks, name] = region
                if self.failure is not None:
                    region.abort(*self.failure)
                for rank in self.left.intersection(ranks):
                    region.leave(ranks.index(rank))
            return region

    def fail(self, failure: CommunicatorFailure) -> None:
        """Break all present and future communicators; only the first failure counts."""
        with self.changed:
            self.failure = self.failure or failure
            for region in self.regions.values():
                region.abort(*self.failure)
            self.changed.notify_all()

    def leave(self, rank: int) -> None:
        """Mark ``rank`` as gone, so that no rank waits for it, even in a communicator that it never opened."""
        with self.changed:
            self.left.add(rank)
            for (ranks, _), region in self.regions.items():
                if rank in ranks:
                    region.leave(ranks.index(rank))
            self.changed.notify_all()


class _ThreadStatusStore:
    """Store the status board's slots in memory, for one rank of :func:`run_threads`."""

    def __init__(self, run: _ThreadRun, rank: int) -> None:
        self._run = run
        self._rank = rank

    def write(self, slot: RankStatus) -> None:
        with self._run.changed:
            self._run.slots[self._rank] = slot

    def read(self) -> list[RankStatus]:
        with self._run.changed:
            return list(self._run.slots)

    def failure(self) -> CommunicatorFailure | None:
        return self._run.failure


class ThreadWorld(World):
    """Represent the ranks of :func:`run_threads`, as seen from one of them."""

    def __init__(self, rank: int, run: _ThreadRun, timeout_s: float) -> None:
        slots = _ThreadStatusStore(run, rank)
        super().__init__(rank, run.size, torch.device("cpu"), range(run.size), timeout_s, slots)
        self._run = run
        self._came: Counter[str] = Counter()  # to exchanges

    def _exchange(self, value: object, channel: str, group: tuple[int, ...]) -> list[Any]:
        run, place = self._run, format_exchange_place(channel, group)
        here = make_exchange_rendezvous(place, channel, self._came[place] + 1, group or range(self.size))
        with run.changed:
            values = run.exchanges.setdefault((place, here.number), {})
            values[self.rank] = json.dumps(value)
            # A rank in this exchange has left the previous one, but slower ranks may still read its values; two back is
            # safe.
            run.exchanges.pop((place, here.number - 2), None)
            run.changed.notify_all()
        self._came[place] = here.number
        with WaitWatcher(self.board, here, self.rank) as watch:
            failure = self.board.failure(known=True) or self._await(values, here.ranks, watch)
        if failure is not None:
            raise failure.error(watch.subject)
        return [json.loads(values[rank]) for rank in here.ranks]

    def _await(self, values: dict[int, str], ranks: Sequence[int], watch: WaitWatcher) -> CommunicatorFailure | None:
        """Wait for the values of all ``ranks``; return a failure if some will never arrive."""
        run = self._run
        deadline_s = time.monotonic() + self.timeout_s

        def over() -> bool:
            missing = set(ranks) - values.keys()
            return not missing or run.failure is not None or not missing.isdisjoint(run.left)

        while True:
            left_s = deadline_s - time.monotonic()
            with run.changed:
                ended = run.changed.wait_for(over, max(0.0, min(left_s, SLICE_S)))
                if len(values) == len(ranks):
                    return None
                if run.failure is not None:
                    return run.failure
                if ended or left_s <= 0:
                    why = ": the others ended" if ended else ""
                    return CommunicatorFailure(
                        "closed" if ended else "timeout",
                        self.rank,
                        f"all {len(ranks)} ranks within {self.timeout_s} s",
                        f"ranks {sorted(values)} alone{why}",
                        "See the error of the first rank that failed, or what the others do.",
                    )
            watch.look()  # after releasing the condition: the board has a lock as well

    def fail(self, failure: CommunicatorFailure) -> None:
        self._run.fail(failure)
        super().fail(failure)

    def _leave(self) -> None:
        self._run.leave(self.rank)
        super()._leave()

    def _arrived(self) -> dict[str, int]:
        return {**super()._arrived(), **self._came}

    def _make(self, ranks: tuple[int, ...], name: str) -> Communicator:
        region = self._run.region(ranks, name)
        return shared_memory.SharedMemoryCommunicator(
            region, ranks, ranks.index(self.rank), name, pids=(), timeout_s=self.timeout_s, make=self._make
        )


def run_threads(
    size: int, fn: Callable[[World], _Result], *, timeout_s: float = 60.0, limit_s: float | None = None
) -> list[_Result]:
    """Run ``fn(world)`` on ``size`` ranks, each a thread, and return the results, by rank.

    Inside, ``current_world()`` is the rank's world. The first exception ends the waits of all ranks and is raised
    here::

        assert run_threads(2, lambda world: world.exchange(world.rank)) == [[0, 1], [0, 1]]

    Args:
        timeout_s: seconds that a collective may wait.
        limit_s: seconds for the run; None: ten times ``timeout_s``.

    Raises:
        CollectiveError: the ranks did not end within ``limit_s``.
    """
    limit_s = 10 * timeout_s if limit_s is None else limit_s
    run = _ThreadRun(size)
    worlds = [ThreadWorld(rank, run, timeout_s) for rank in range(size)]
    results: dict[int, _Result] = {}

    def body(world: ThreadWorld) -> None:
        observe.set_rank(world.rank)
        try:
            with entered(world):
                results[world.rank] = fn(world)
                world.drain()
        except BaseException as error:
            with run.changed:  # only the first: further errors are its consequences
                run.first_error = run.first_error or error
            world.abort(f"{type(error).__name__}: {error}")
        finally:
            world.close()

    threads = [threading.Thread(target=body, args=(world,), name=f"rank {world.rank}", daemon=True) for world in worlds]
    for thread in threads:
        thread.start()
    try:
        stuck = _join_threads(threads, limit_s)
    except BaseException as error:
        run.fail(make_abort_failure(0, type(error).__name__))
        raise
    if stuck:
        run.fail(make_abort_failure(0, f"not done after {limit_s} s"))
        raise CollectiveError(
            "run_threads",
            expected=f"{size} ranks to end within {limit_s} s",
            got=f"{', '.join(stuck)} still running",
            do="See what they do, or raise limit_s.",
        ) from run.first_error
    if run.first_error is not None:
        raise run.first_error
    return [results[rank] for rank in range(size)]


def _join_threads(threads: list[threading.Thread], timeout_s: float) -> list[str]:
    """Return the names of the threads that still run after ``timeout_s``."""
    deadline = time.monotonic() + timeout_s
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))
    return [thread.name for thread in threads if thread.is_alive()]
