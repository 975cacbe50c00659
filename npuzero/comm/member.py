"""Define one rank of a group: name and place of the group, its waits, and its end."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import final

import torch

from npuzero.comm.watchdog.hang_detector import (
    CommunicatorFailure,
    HangDetector,
    Rendezvous,
    WaitWatcher,
    make_abort_failure,
)


class GroupRank(ABC):
    """Represent one rank of an ordered group.

    Attributes:
        ranks: of the run, in the order of the group.
        rank: this rank's index in the group.
        size: number of ranks.
        name: of the channel: two communicators of the same ranks do not disturb each other.
        device: of the tensors.
        place: the group's name on the status board, the same on all ranks.
        started: number of operations that this rank has started.
        board: the world's status board, where this rank posts its waits.
    """

    def __init__(self, ranks: Sequence[int], rank: int, name: str, device: torch.device) -> None:
        self.ranks = tuple(ranks)
        self.rank = rank
        self.size = len(self.ranks)
        self.name = name
        self.device = device
        self.place = f"{name}/{'-'.join(map(str, self.ranks))}"
        self.started = 0
        self.board: HangDetector | None = None

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.name!r}, ranks={self.ranks}, rank={self.rank})"

    def arrived(self) -> dict[str, int]:
        """Return the number of operations that this rank has started at each place of the group."""
        return {self.place: self.started}

    def meeting(self, number: int, verb: str, tag: str) -> Rendezvous:
        """Return operation ``number`` as a rendezvous of the ranks."""
        what = f"{verb} #{number}" + (f" tagged {tag!r}" if tag else "")
        return Rendezvous(self.place, number, self.ranks, f"{what} of {self.name!r}")

    def watch(self, number: int, verb: str, tag: str) -> WaitWatcher:
        """Return a watcher for the calling thread's wait for operation ``number``."""
        return WaitWatcher(self.board, self.meeting(number, verb, tag), self.ranks[self.rank])

    @final
    def abort(self, reason: str) -> None:
        """Break the group, on every rank if the implementation can."""
        self.fail(make_abort_failure(self.ranks[self.rank], reason))

    @abstractmethod
    def fail(self, failure: CommunicatorFailure) -> None:
        """Break the group with ``failure``; the first failure stays."""

    def drain(self) -> None:
        """Wait until operations started here are done or have failed: remaining ranks may need this rank's part."""
        return

    @abstractmethod
    def close(self) -> None:
        """Free resources; operations that were not waited for fail. Idempotent."""
