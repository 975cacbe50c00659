"""One rank's place in a group: what the group is called, where its ranks meet, and how it ends."""

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
    """Be one rank of an ordered group.

    Attributes:
        ranks: of the run, in the order of the group.
        rank: this rank's index in it.
        size: how many there are.
        name: of the channel: two communicators of the same ranks do not disturb each other.
        device: where the tensors live.
        place: its name on the board, the same on all ranks.
        started: operations that this rank has started.
        board: where this rank says that it waits, in a world.
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
        """Return how often this rank has come to each place of the group."""
        return {self.place: self.started}

    def meeting(self, number: int, verb: str, tag: str) -> Rendezvous:
        """Return the operation ``number`` as a place where ranks meet."""
        what = f"{verb} #{number}" + (f" tagged {tag!r}" if tag else "")
        return Rendezvous(self.place, number, self.ranks, f"{what} of {self.name!r}")

    def watch(self, number: int, verb: str, tag: str) -> WaitWatcher:
        """Return the watch for a wait of the calling thread for the operation ``number``."""
        return WaitWatcher(self.board, self.meeting(number, verb, tag), self.ranks[self.rank])

    @final
    def abort(self, reason: str) -> None:
        """Break the group, on every rank where the implementation can."""
        self.fail(make_abort_failure(self.ranks[self.rank], reason))

    @abstractmethod
    def fail(self, failure: CommunicatorFailure) -> None:
        """Break it likewise, for ``failure``; the first one stays."""

    def drain(self) -> None:
        """Wait until operations started here are done or have failed: other ranks may need this one's part."""
        return

    @abstractmethod
    def close(self) -> None:
        """Free resources; operations not waited for fail. Calling it again does nothing."""
