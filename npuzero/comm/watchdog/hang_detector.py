"""Detect deadlocks by a status board, where each rank posts its waits, and report the place of every rank.

Each rank has one slot on the board. It lists the waits of the rank's threads, and counts the operations that the rank
has reached at each place. A wait is posted after ``PATIENCE_S``, so a healthy step costs nothing. A waiting rank reads
the board.

Invariants:
    * a slot lists waits only while *every* thread of its rank that uses the world waits: a rank that computes may
      still reach any operation, even after a long time;
    * a wait is removed from the board before its thread continues, and counts only grow. So if each rank of a set waits
      for a rank of the set that has not arrived, or for one that has ended, the set is deadlocked, and all ranks raise;
    * a rank that left a call by an exception may still arrive: its program may have caught the exception. Its slot
      shows the exception until the rank calls again; a rank that waits for it longer than ``WARN_S`` warns, once.
"""

from __future__ import annotations

import threading
import time
import warnings
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import NamedTuple, Protocol

from npuzero.comm.watchdog.call_names import STEP, CallSite, error_subject, find_call_site, record_exits
from npuzero.comm.watchdog.frozen_parameters import FrozenParameters, describe_frozen_difference
from npuzero.device.lane import LaneThread, Patience
from npuzero.errors import CollectiveError

#: Seconds that a wait may last before it is posted on the board.
PATIENCE_S = 0.5

#: Seconds between two reads of the board: at first, and at most. The last rank to arrive reads early for all ranks.
_LOOK_S = 0.25
_LOOK_MOST_S = 1.0

#: Characters of an exception's text that are kept.
_TEXT = 300

#: Seconds that a wait may last before it warns of a rank that left a call by an exception and has not called again.
WARN_S = 10.0

#: Seconds between two calls of ``WaitWatcher.look`` by a thread that polls.
SLICE_S = 0.05


class CommunicatorFailure(NamedTuple):
    """Describe why communicators are broken, for a CollectiveError; ``origin`` is the rank that detected it."""

    kind: str
    origin: int
    expected: str
    got: str
    do: str

    def error(self, subject: str, **facts: object) -> CollectiveError:
        """Return the error of an operation that met this failure."""
        kind, origin, expected, got, do = self
        return CollectiveError(subject, expected=expected, got=got, do=do, kind=kind, origin=origin, **facts)


def make_abort_failure(rank: int, reason: str) -> CommunicatorFailure:
    """Return the failure of a rank that gave up."""
    return CommunicatorFailure(
        "aborted", rank, "every rank to go on", f"rank {rank} aborted: {reason}", "Look at the error of that rank."
    )


class Rendezvous(NamedTuple):
    """Name the ``number``-th operation of ``ranks`` at ``place``; ``text`` describes it in messages."""

    place: str
    number: int
    ranks: tuple[int, ...]
    text: str


class PendingWait(NamedTuple):
    """Record that a thread waits in ``meeting`` since ``since_s`` (time.time), called from ``where``."""

    meeting: Rendezvous
    since_s: float
    where: CallSite = CallSite()

    def text(self, size: int, missed: str = "") -> str:
        """Return the wait as text, in a world of ``size`` ranks; some of them have not called ``missed``."""
        ranks, call = self.meeting.ranks, self.where.call
        among = f" among {format_rank_list(ranks)}" if len(ranks) < size else ""
        operation = f"{self.meeting.text}{among}"
        if not call:
            return f"waits in {operation}" + (self.where.line and f", called at {self.where.line}")
        line = self.where.line and f" at {self.where.line}"
        is_in = f"in {call}{line}" if missed in ("", call) else f"went on to {call}{line} without {missed}"
        return f"{is_in} ({operation})"


class CallExit(NamedTuple):
    """Record that a rank left the call at ``where`` by ``error`` (its type and text), at ``at_s`` (time.time)."""

    where: CallSite
    error: str
    at_s: float

    def text(self) -> str:
        """Return the exit as text."""
        line = self.where.line and f", called at {self.where.line},"
        return (
            f"left {self.where.call}{line} by {self.error} at {_format_clock_time(self.at_s)}, and has called "
            "nothing since"
        )


class RankStatus(NamedTuple):
    """Hold one rank's ``waits`` (none while it may go on), its ``arrived`` counts by place, and how it ``ended``.

    ``left``: the call that it left by an exception, until it calls again. ``frozen``: the parameters that it has frozen
    of each of its models, where it waits.
    """

    waits: tuple[PendingWait, ...]
    arrived: dict[str, int]
    ended: str = ""
    left: CallExit | None = None
    frozen: tuple[FrozenParameters, ...] = ()


#: The slot of a rank that does not wait.
NOWHERE = RankStatus((), {})


class StatusStore(Protocol):
    """Store the slots of all ranks."""

    def write(self, slot: RankStatus) -> None:
        """Set the slot of this rank."""

    def read(self) -> list[RankStatus]:
        """Return all slots, by rank."""

    def failure(self) -> CommunicatorFailure | None:
        """Return why the world is broken; None if it is not."""


class NullStatusStore:
    """Store nothing, for a rank without other ranks."""

    def write(self, slot: RankStatus) -> None:
        return

    def read(self) -> list[RankStatus]:
        return []

    def failure(self) -> CommunicatorFailure | None:
        return None


def find_stuck_ranks(slots: Sequence[RankStatus]) -> list[int]:
    """Return the deadlocked ranks in ascending order: none of their waits can ever end."""
    # Start with all ranks that wait or have ended. Remove each rank with a wait that may end, because every rank that
    # it needs has arrived or is not in the set, until the set is stable. The rest waits for each other or for ended
    # ranks.
    found = {rank for rank, slot in enumerate(slots) if slot.waits or slot.ended}

    def may_resolve(wait: PendingWait) -> bool:
        place, number, ranks, _ = wait.meeting
        return all(rank not in found or slots[rank].arrived.get(place, 0) >= number for rank in ranks)

    while free := {rank for rank in found if any(may_resolve(wait) for wait in slots[rank].waits)}:
        found -= free
    return sorted(rank for rank in found if slots[rank].waits)


class HangDetector:
    """Record the waits of one rank, and read the status board of its world.

    Args:
        arrived: returns the number of operations that this rank has reached at each place.
        fail: breaks the world, for all ranks, permanently.

    Attributes:
        warn_s: seconds that a wait may last before it warns of ranks that left a call by an exception.
    """

    def __init__(
        self,
        rank: int,
        slots: StatusStore,
        arrived: Callable[[], dict[str, int]],
        fail: Callable[[CommunicatorFailure], None],
    ) -> None:
        self.rank = rank
        self._slots = slots
        self._arrived = arrived
        self._fail = fail
        self._lock = threading.RLock()
        self._here = threading.local()
        self._threads: set[threading.Thread] = set()
        self._waits: dict[threading.Thread, PendingWait] = {}
        self._written = NOWHERE
        self._failure: CommunicatorFailure | None = None
        self._left: CallExit | None = None
        self._warned: set[tuple[int, CallExit]] = set()
        self._models: list[weakref.WeakMethod[Callable[[], FrozenParameters]]] = []
        self.warn_s = WARN_S

    def watch_model(self, frozen: Callable[[], FrozenParameters]) -> None:
        """Ask ``frozen``, a method, in each long wait of this rank, as long as its object lives."""
        self._models = [*(model for model in self._models if model()), weakref.WeakMethod(frozen)]

    def enter(self) -> None:
        """Register the calling thread as a user of the world, once per thread."""
        record_exits(self)
        self.clear_exit()
        if getattr(self._here, "known", False):
            return
        self._here.known = True
        thread = threading.current_thread()
        # A lane runs work of another thread. torch's own threads (of autograd) work while another thread waits for
        # them.
        if not isinstance(thread, (LaneThread, threading._DummyThread)):
            with self._lock:
                self._threads.add(thread)
                self._write()

    def close(self) -> None:
        """Record that this rank has left the world."""
        with self._lock, suppress(CollectiveError):  # the board is gone if its store is
            self._put(RankStatus((), self._arrived(), "has ended"))

    def post(self, wait: PendingWait) -> None:
        """Write the calling thread's wait to the board."""
        with self._lock:
            self._waits[threading.current_thread()] = wait
            self._write()

    def withdraw(self) -> None:
        """Remove the calling thread's wait."""
        with self._lock:
            self._waits.pop(threading.current_thread(), None)
            self._write()

    def record_exit(self, call: str, error: BaseException | None) -> None:
        """Record that this rank has left ``call`` by ``error``; None: by an unknown exception."""
        if isinstance(error, (CollectiveError, GeneratorExit)):
            return  # a CollectiveError is known to all ranks, and GeneratorExit is no error
        text = "an exception" if error is None else f"{type(error).__name__}: {error}".partition("\n")[0]
        with self._lock, suppress(CollectiveError):  # the board is gone if its store is
            self._left = CallExit(CallSite(call, find_call_site().line), text[:_TEXT], time.time())
            self._write()

    def clear_exit(self) -> None:
        """Clear the record: this rank calls again."""
        if self._left is None:
            return
        with self._lock, suppress(CollectiveError):
            self._left = None
            self._write()

    def warn_of_exits(self, slots: Sequence[RankStatus], subject: str, waited_s: float) -> None:
        """Warn, once per exit, of ranks that left a call by an exception. Only the first waiting rank warns."""
        if waited_s < self.warn_s or self.rank != next((rank for rank, slot in enumerate(slots) if slot.waits), None):
            return
        told = {(rank, slot.left) for rank, slot in enumerate(slots) if slot.left is not None and not slot.ended}
        new = sorted(told - self._warned)
        self._warned |= told
        if new:
            who = "; ".join(f"rank {rank} {left.text()}" for rank, left in new)
            do = "Where a program catches an exception of one rank, let every rank leave the step, or end that rank."
            text = f"{subject} has waited for {waited_s:.0f} s: {who}. {do}"
            warnings.warn(text, RuntimeWarning, stacklevel=1)

    def failure(self, *, known: bool = False) -> CommunicatorFailure | None:
        """Return why the world is broken, if it is; with ``known``, only a failure that this rank has already seen."""
        if self._failure is None and not known:
            self._failure = self._slots.failure()
            if self._failure is not None:
                self._fail(self._failure)
        return self._failure

    def cause(self, expected: str, got: str) -> CommunicatorFailure | None:
        """Return why other ranks may have broken a connection: the world is broken, or some ranks have left it."""
        deadline_s = time.monotonic() + PATIENCE_S
        with suppress(CollectiveError):  # the board is gone if its store is
            while time.monotonic() < deadline_s:
                failure = self.failure()
                gone = {rank: slot.ended for rank, slot in enumerate(self.read()) if slot.ended and rank != self.rank}
                if failure is None and gone:
                    who = "; ".join(f"rank {rank} {ended}" for rank, ended in gone.items())
                    kind = "dead" if "is dead" in gone.values() else "closed"
                    do = "Let every rank run the same steps before it ends; see the last output of those that ended."
                    failure = CommunicatorFailure(kind, self.rank, expected, f"{who} ({got})", do)
                if failure is not None:
                    return failure
                time.sleep(SLICE_S)  # a process that has closed its connections may still be exiting
        return None

    def read(self) -> list[RankStatus]:
        """Return the slots of all ranks, after updating this rank's."""
        with self._lock:
            self._write()
        return self._slots.read()

    def linger(self, stuck: Mapping[int, RankStatus]) -> None:
        """Wait a little until all ``stuck`` ranks know of it: if this rank ended now, it would seem the cause."""
        deadline_s = time.monotonic() + 2 * _LOOK_MOST_S
        while time.monotonic() < deadline_s:
            now = self._slots.read()
            if all(now[rank] != slot for rank, slot in stuck.items() if rank != self.rank):
                return
            time.sleep(SLICE_S)

    def condemn(self, slots: Sequence[RankStatus]) -> CommunicatorFailure | None:
        """Break the world, because some ranks are deadlocked."""
        return self.say("diverged", dict(enumerate(slots)))

    def say(self, kind: str, slots: Mapping[int, RankStatus]) -> CommunicatorFailure | None:
        """Break the world by a failure of ``kind`` with the places of the ranks of ``slots``."""
        missed = _find_missed_call(slots)
        expected = "all ranks to do the same, in the same order"
        do = "Look for a branch that only some ranks take: save, load, export, clip, step and evaluate on every rank."
        if missed:
            expected = f"{missed} on every rank, since it is collective"
            do = f"Look for a branch that only some ranks take, and call {missed} on every rank."
        got = _describe_statuses(slots, missed)
        # The first cause: ranks that train different parameters issue different collectives wherever they are.
        if frozen := describe_frozen_difference({rank: slot.frozen for rank, slot in slots.items()}):
            expected = "the same parameters to be frozen on every rank"
            do = "Call requires_grad_(False) for the same parameters on every rank."
            got = f"{frozen} ({_describe_statuses(slots, '')})"
        self._fail(CommunicatorFailure(kind, self.rank, expected, got, do))
        return self.failure()

    def _write(self) -> None:
        self._threads = {thread for thread in self._threads if thread.is_alive()}
        waits = tuple(self._waits.values()) if self._threads <= self._waits.keys() else ()
        if waits or self._written.waits or self._left != self._written.left:
            self._put(self._waiting(waits) if waits else NOWHERE._replace(left=self._left))

    def _waiting(self, waits: tuple[PendingWait, ...]) -> RankStatus:
        frozen = tuple(method() for method in (model() for model in self._models) if method is not None)
        return RankStatus(waits, self._arrived(), frozen=frozen)

    def _put(self, slot: RankStatus) -> None:
        if slot != self._written and not self._written.ended:
            self._written = slot
            self._slots.write(slot)


class WaitWatcher:
    """Watch one wait of one thread, which calls :meth:`look` repeatedly, and :meth:`end` before it continues.

    Args:
        board: the status board; None: nothing is posted or read.
    """

    def __init__(self, board: HangDetector | None, meeting: Rendezvous, rank: int) -> None:
        self._rank = rank
        self._board = board
        self._wait = PendingWait(meeting, time.time())
        self._begin_s = time.monotonic()
        self._next_s = self._begin_s + PATIENCE_S
        self._pause_s = _LOOK_S
        self._posted = False
        self._before: dict[int, RankStatus] = {}
        self._condemned = False

    @property
    def subject(self) -> str:
        """Return the subject of an error of the wait."""
        return error_subject(self._wait.meeting.text, self._rank)

    def __enter__(self) -> WaitWatcher:
        return self

    def __exit__(self, *_: object) -> None:
        self.end()

    def look(self) -> CommunicatorFailure | None:
        """Return why the wait can never end, if that is known."""
        board = self._board
        if board is None or time.monotonic() < self._next_s or isinstance(threading.current_thread(), LaneThread):
            return None
        try:
            return self._look(board)
        except CollectiveError:  # the board is gone with its store: the wait may still end normally
            return None
        finally:
            self._next_s = time.monotonic() + self._pause_s

    def end(self) -> None:
        """Remove the wait from the board."""
        if self._board is not None and self._posted:
            self._posted = False
            try:
                self._board.withdraw()
                if self._condemned:
                    self._board.linger(self._before)
            except CollectiveError:  # as in look()
                return

    def explain(self, failure: CommunicatorFailure) -> CommunicatorFailure:
        """Return a failure with the places of all ranks of mismatched operations, or ``failure`` if they are not known.

        Waits briefly until all these ranks have posted their place.
        """
        board = self._board
        if board is None or not find_call_site().call:
            return failure
        deadline_s = time.monotonic() + 2 * _LOOK_MOST_S
        with suppress(CollectiveError):  # the board is gone if its store is
            self._post(board)
            while time.monotonic() < deadline_s:
                slots = dict(enumerate(board.read()))
                there = {rank: slots[rank] for rank in self._wait.meeting.ranks if slots and slots[rank].waits}
                said = board.failure()
                calls = {wait.where.call for slot in there.values() for wait in slot.waits}
                if said is None and len(there) == len(self._wait.meeting.ranks) and len(calls) > 1:
                    said = board.say(failure.kind, there)
                if said is not None:
                    return said
                time.sleep(SLICE_S)
        return failure

    def _post(self, board: HangDetector) -> None:
        if not self._posted:
            self._posted = True
            board.enter()
            board.post(self._wait._replace(where=find_call_site()))

    def _look(self, board: HangDetector) -> CommunicatorFailure | None:
        self._post(board)
        failure = board.failure()
        if failure is not None:
            return failure
        slots = board.read()
        board.warn_of_exits(slots, self.subject, time.monotonic() - self._begin_s)
        found = {rank: slots[rank] for rank in find_stuck_ranks(slots)}
        if found and found == self._before:
            self._condemned = True
            return board.condemn(slots)
        self._pause_s = _LOOK_S if found else min(2 * self._pause_s, _LOOK_MOST_S)
        self._before = found
        return None


def make_patient_wait(watch: Callable[[], WaitWatcher], check: Callable[[], object] = lambda: None) -> Patience:
    """Return a wait function for a lane's steps that need other ranks: a long wait is posted on the board.

    ``check`` is called in long waits, and raises if the operation has failed.
    """

    def wait(event: threading.Event) -> None:
        if event.wait(SLICE_S):
            return
        with watch() as waiting:
            while not event.wait(SLICE_S):
                check()
                failure = waiting.look()
                if failure is not None:
                    raise failure.error(waiting.subject)

    return wait


def _find_missed_call(slots: Mapping[int, RankStatus]) -> str:
    """Return the call that some ranks are in and others have left out; "" if it is ambiguous."""
    calls = [{wait.where.call for wait in slot.waits} for slot in slots.values()]
    known = {call for of_rank in calls for call in of_rank if call}
    beside = known.difference(STEP) or known & {"optimizer.step"}
    missed = beside.pop() if len(beside) == 1 else ""
    return missed if any(missed not in of_rank for of_rank in calls) else ""


def _describe_statuses(slots: Mapping[int, RankStatus], missed: str) -> str:
    """Describe the place of each rank and its time, grouped by place; ``missed``: the missed call, or ""."""
    ranks_by_text: dict[str, list[int]] = {}  # grouped, since most of many ranks wait in one place
    for rank, slot in slots.items():
        waits = " and ".join(wait.text(len(slots), missed) for wait in slot.waits)
        ended = slot.ended and slot.ended + (missed and f" without {missed}")
        left = slot.left.text() if slot.left is not None else ""
        ranks_by_text.setdefault(ended or waits or left or "does not wait, and may come", []).append(rank)
    parts = []
    for text, ranks in ranks_by_text.items():
        begins = sorted(wait.since_s for rank in ranks for wait in slots[rank].waits)
        since = " to ".join(dict.fromkeys(map(_format_clock_time, (begins[0], begins[-1])))) if begins else ""
        parts.append(f"{format_rank_list(ranks)}: {text}" + (since and f", since {since}"))
    return "; ".join(parts)


def _format_clock_time(time_s: float) -> str:
    return time.strftime("%H:%M:%S", time.localtime(time_s))


def format_rank_list(ranks: Sequence[int]) -> str:
    """Return ranks as text; of many the first ones."""
    return "rank " + ", ".join(map(str, ranks[:8])) + (f" and {len(ranks) - 8} more" if len(ranks) > 8 else "")
