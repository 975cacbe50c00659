"""Report the ranks that have and have not joined, once, while ranks wait for each other."""

from __future__ import annotations

import itertools
import socket
import threading
import time
import warnings
from collections.abc import Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Protocol

import torch.distributed as dist

from npuzero import config
from npuzero.comm.rendezvous.store import PrefixedStore
from npuzero.comm.watchdog.call_names import find_call_site
from npuzero.comm.watchdog.hang_detector import PATIENCE_S, format_rank_list
from npuzero.errors import CollectiveError

#: Seconds after which missing ranks are named; less with a short timeout.
_SAY_S = 10.0

#: Seconds between two attempts to reach the store, and limit of an attempt.
_PAUSE_S = 1.0

#: Expectation and advice in errors about a rank that does not join.
EXPECTED = "npuzero.init() on every rank, since it is collective"
DO = (
    "See whether every rank was started, and whether its first error is another; look for a branch before "
    "npuzero.init() (zero() calls it where nobody has) that only some ranks take."
)

_joins = itertools.count(1)


class RankRegistry(Protocol):
    """Keep the ranks that have joined."""

    size: int

    def answer(self) -> None:
        """Mark this rank as joined.

        Raises:
            CollectiveError: the store cannot be reached.
        """

    def missing(self) -> list[int]:
        """Return the ranks that have not joined; CollectiveError as above."""


class StoredRankRegistry:
    """Keep the roll in the launcher's store, separate from torch's keys.

    The n-th roll of a rank matches the n-th roll of every rank.

    Args:
        address: ``host:port`` of the store.
    """

    def __init__(self, rank: int, size: int, address: str) -> None:
        self.size = size
        self._rank = rank
        self._address = address
        self._prefix = f"npuzero/roll/{next(_joins)}/"
        self._store: PrefixedStore | None = None

    def answer(self) -> None:
        """Connect, and write this rank's key."""
        host, _, port = self._address.rpartition(":")
        try:
            # torch retries until its timeout, with a warning each time; a plain socket fails at once.
            socket.create_connection((host, int(port)), _PAUSE_S).close()
            client = dist.TCPStore(  # type: ignore[attr-defined]
                host, int(port), is_master=False, timeout=timedelta(seconds=_SAY_S), wait_for_workers=False
            )
        except (OSError, RuntimeError) as error:
            keeper = "torchrun's agent on the first node" if config.agent_keeps_store() else "rank 0"
            raise CollectiveError(
                "the roll of ranks",
                expected=f"{keeper} to keep the ranks' store",
                got=f"nobody answers at {self._address}, where {keeper} keeps the ranks' store",
                do="See whether that process runs, and can be reached from here.",
            ) from error
        store = PrefixedStore(client).within(self._prefix)
        store.set(str(self._rank), "here")
        self._store = store

    def missing(self) -> list[int]:
        """Return the ranks without a key."""
        if self._store is None:
            self.answer()
        assert self._store is not None
        return [int(key) for key in self._store.missing([str(rank) for rank in range(self.size)])]


class RollCall:
    """Watch a ``with`` block that waits for all ranks: warn once if it is long, and keep the last report.

    A thread polls, since the wait may be torch's. It starts to do so after ``PATIENCE_S``, so a fast join has no cost.

    Attributes:
        said: the last report of joined and missing ranks; "" before the first poll.
    """

    def __init__(self, roll: RankRegistry, timeout_s: float) -> None:
        self.said = ""
        place = find_call_site()
        self._call = f"npuzero.{place.call or 'init'}()" + (place.line and f" at {place.line}")
        self._roll = roll
        self._say_s = min(_SAY_S, timeout_s / 3)
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="npuzero roll call", daemon=True)

    def __enter__(self) -> RollCall:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join(_PAUSE_S)  # no later fork should happen while it runs

    def _watch(self) -> None:
        begin_s = time.monotonic()
        answered = self._over.wait(min(PATIENCE_S, self._say_s / 2)) or self._answered()
        warned = False
        while not self._over.wait(self._say_s if answered else _PAUSE_S):
            answered = answered or self._answered()
            waited_s = time.monotonic() - begin_s
            if waited_s < self._say_s:
                continue
            self.said = self._look()
            if self.said and not warned:
                warned = True
                text = f"{self._call} has waited for {waited_s:.0f} s: {self.said}. {DO}"
                warnings.warn(text, RuntimeWarning, stacklevel=1)

    def _answered(self) -> bool:
        with suppress(CollectiveError):
            self._roll.answer()
            return True
        return False

    def _look(self) -> str:
        try:
            missing = self._roll.missing()
        except CollectiveError as error:
            return error.got
        return describe_missing_ranks(missing, self._roll.size) if missing else ""


def describe_missing_ranks(missing: Sequence[int], size: int) -> str:
    """Describe the ranks of ``size`` that have and have not joined, and their processes on this host."""
    text = f"{size - len(missing)} of {size} ranks have joined, and wait for {format_rank_list(missing)}"
    process_of = config.find_local_ranks()
    running = [rank for rank in missing if rank in process_of]
    gone = [rank for rank in missing if rank not in process_of]
    if running:
        processes = ", ".join(str(process_of[rank]) for rank in running[:8])
        text += f"; {format_rank_list(running)} runs on this host, in process {processes}"
    if process_of and gone:
        text += f"; no process of {format_rank_list(gone)} is to be seen on this host: it has ended, or runs on another"
    return text
