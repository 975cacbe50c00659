"""Exchange small values between ranks through the store; exchanges at a place are matched by number."""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from npuzero.comm.rendezvous.store import PrefixedStore
from npuzero.comm.watchdog.call_names import error_subject
from npuzero.comm.watchdog.hang_detector import (
    CommunicatorFailure,
    HangDetector,
    Rendezvous,
    WaitWatcher,
    format_rank_list,
)

_POLL_S = 0.02


def make_exchange_rendezvous(place: str, channel: str, number: int, ranks: Sequence[int]) -> Rendezvous:
    """Return the ``number``-th exchange of ``ranks`` at ``place``, on ``channel``, as a rendezvous."""
    return Rendezvous(place, number, tuple(ranks), f"exchange #{number}" + (f" of {channel}" if channel else ""))


def format_exchange_place(channel: str, group: Sequence[int] = ()) -> str:
    """Return a channel's name on the status board; ``group``: its ranks, if not all."""
    return f"exchange/{channel}" + (f"/{'-'.join(map(str, group))}" if group else "")


class ValueExchange:
    """Run the exchanges of one rank.

    Args:
        dead: returns whether a rank is known to be dead.
    """

    def __init__(
        self,
        store: PrefixedStore,
        board: HangDetector,
        size: int,
        timeout_s: float,
        dead: Callable[[int], bool],
    ) -> None:
        self._came: Counter[str] = Counter()
        self._store = store
        self._board = board
        self._rank = board.rank
        self._size = size
        self._timeout_s = timeout_s
        self._dead = dead

    def run(self, value: object, channel: str, group: Sequence[int] = ()) -> list[Any]:
        """Return the values of all ranks, or of the ranks in ``group``, in their order; each of these must call it."""
        place, ranks = format_exchange_place(channel, group), group or range(self._size)
        here = make_exchange_rendezvous(place, channel, self._came[place] + 1, ranks)
        failure = self._board.failure(known=True)
        if failure is not None:
            raise failure.error(error_subject(here.text, self._rank))
        self._store.set(_exchange_key(here, self._rank), json.dumps(value))
        self._came[place] += 1
        with WaitWatcher(self._board, here, self._rank) as watch:
            values = [json.loads(self._await(here, rank, watch)) for rank in ranks]
        # All ranks are here, so all have left the previous exchange.
        self._store.delete(_exchange_key(here._replace(number=here.number - 1), self._rank))
        return values

    def arrived(self) -> dict[str, int]:
        """Return the number of exchanges that this rank has reached at each place."""
        return dict(self._came)

    def _await(self, here: Rendezvous, rank: int, watch: WaitWatcher) -> str:
        """Return the value of ``rank`` in this exchange; while it is missing, look for failures that explain it."""
        key = _exchange_key(here, rank)
        begin_s = time.monotonic()
        pause_s = 0.0005
        while not self._store.check(key):
            waited_s = time.monotonic() - begin_s
            failure = watch.look() or self._board.failure() or self._given_up(here, rank, waited_s)
            if failure is not None:
                raise failure.error(watch.subject)
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, _POLL_S)
        return self._store.get(key)

    def _given_up(self, here: Rendezvous, rank: int, waited_s: float) -> CommunicatorFailure | None:
        """Return why this rank should stop waiting for ``rank``, if it should."""
        if self._dead(rank) and not self._store.check(_exchange_key(here, rank)):
            do = f"Look at the last output of rank {rank}."
            return CommunicatorFailure("dead", self._rank, f"rank {rank}", f"rank {rank} is dead", do)
        if waited_s > self._timeout_s:
            rank_of = {_exchange_key(here, each): each for each in here.ranks}
            missing = format_rank_list(
                [rank_of[key] for key in self._store.missing([*rank_of])] or [rank]
            )  # it may have just arrived
            expected = f"{format_rank_list(here.ranks)} within {self._timeout_s} s"
            do = f"See what {missing} does, or raise timeout_s."
            return CommunicatorFailure("timeout", self._rank, expected, f"nothing from {missing}", do)
        return None


def _exchange_key(here: Rendezvous, rank: int) -> str:
    """Return the store's key of a rank's value."""
    return f"{here.place}/{here.number}/{rank}"
