"""Worlds: ranks of a run that work together, and the communicators between them.

A world is all ranks of a run, or a part of them: ``world.part(ranks)`` is a world of its own, in which another model
may be trained. Ranks count from 0 in each world. ``ranks`` tells which of the run's ranks they are; errors, events and
communicators speak of those. How a run's ranks reach each other is known to its own world (``process_world.py``,
``loopback.py``), which a part asks.
"""

from __future__ import annotations

import json
import threading
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, final

import torch

from npuzero.comm.backends.single import SingleCommunicator
from npuzero.comm.communicator import Communicator
from npuzero.comm.companions import BackgroundUsers
from npuzero.comm.watchdog import fork
from npuzero.comm.watchdog.call_names import collective_call
from npuzero.comm.watchdog.hang_detector import (
    CommunicatorFailure,
    HangDetector,
    NullStatusStore,
    StatusStore,
    make_abort_failure,
)
from npuzero.config import describe_value
from npuzero.errors import ContractError

TIMEOUT_S = 600.0

#: The channel whose tensors lie on the host, whatever the device: what the host has to know within a step goes over it,
#: since reading a device's tensor waits for all that was issued before.
HOST_CHANNEL = "host"


class World(ABC):
    """Represent ranks that work together, seen from one of them.

    Attributes:
        rank, size: this rank among them.
        ranks: which ranks of the run they are: all, in order, unless this is a part.
        device: where this rank computes.
        local: its ranks that share this rank's host.
        timeout_s: seconds before a waiting collective gives up.
        board: where this rank says that it waits, and sees where the others do.
        companions: what uses the world beside the main thread; its end waits for them.
        closed: whether this rank has left it.
    """

    def __init__(
        self,
        rank: int,
        size: int,
        device: torch.device,
        local: Sequence[int],
        timeout_s: float = TIMEOUT_S,
        slots: StatusStore | None = None,
    ) -> None:
        self.rank = rank
        self.size = size
        self.ranks: Sequence[int] = range(size)
        self.device = device
        self.local = tuple(local)
        self.timeout_s = timeout_s
        self.closed = False
        self._communicators: dict[tuple[tuple[int, ...], str], Communicator] = {}
        self._parts: dict[tuple[int, ...], SubWorld] = {}
        self._making = threading.Lock()
        self.companions = BackgroundUsers()
        self._birthplace = fork.CreatingProcess()
        self.board = HangDetector(rank, slots or NullStatusStore(), self._arrived, self.fail)

    def __repr__(self) -> str:
        return f"{type(self).__name__}(rank={self.rank}, size={self.size}, device={self.device})"

    @final
    def communicator(self, ranks: Sequence[int], name: str) -> Communicator:
        """Connect ``ranks``, in that order, for the purpose ``name``; return the same communicator each time.

        Members ask for the communicators of equal ranks in the same order. A purpose is any word, and names a channel:
        what runs on one does not disturb the others. Tensors lie on the world's device, those of the ``HOST_CHANNEL``
        on the host; channels whose names begin with ``control`` are taken to carry small messages.

        Raises:
            ContractError: a rank is named twice, is not in the world, or this one is missing.
            CollectiveError: it cannot be made.
            StateError: this process is a forked child of the rank's.
        """
        subject = f"communicator {name!r}"
        self._check_birthplace(subject)
        key = (tuple(ranks), name)
        self.board.enter()
        with self._making:
            if key not in self._communicators:
                self._check_ranks(subject, key[0])
                made = self._make(*key) if len(key[0]) > 1 else self._make_single(name)
                made.board = self.board
                self._communicators[key] = made
            return self._communicators[key]

    @final
    def part(self, ranks: Sequence[int]) -> World:
        """Return a world of ``ranks``, which count from 0 there in the order given; the same object each time::

            half = world.size // 2
            part = world.part(range(half) if world.rank < half else range(half, world.size))
            model = npuzero.zero(model, stage=2, world=part)  # two models, each on its half of the ranks

        Its members call it, others need not; nobody waits. It has communicators and exchanges of its own, this world's
        device, timeout and board: ranks that wait for each other in different parts are found, too. It closes when this
        world does, and an abort of one is an abort of all. A part of a part is a part of the run. All ranks in order
        are the world itself.

        Raises:
            ContractError: a rank is named twice, is not in the world, or this one is missing.
            StateError: this process is a forked child of the rank's.
        """
        self._check_birthplace("part")
        self._check_ranks("part", tuple(ranks))
        members = tuple(self.ranks[rank] for rank in ranks)
        whole = self._whole()
        if members == tuple(whole.ranks):
            return whole
        with whole._making:
            if members not in whole._parts:
                whole._parts[members] = SubWorld(whole, members)
            return whole._parts[members]

    @final
    def exchange(self, value: object, channel: str = "") -> list[Any]:
        """Give a small ``value`` of JSON's types to all ranks, and return theirs, by rank; every rank must call it.

        Exchanges on different channels do not disturb each other, so a thread beside the main one takes its own::

            mean = sum(world.exchange(loss.item())) / world.size  # the loss's mean over all ranks

        Raises:
            CollectiveError: a rank died, aborted, or did not call within ``timeout_s``.
            ContractError: JSON has no such type.
            StateError: this process is a forked child of the rank's.
        """
        self._check_birthplace("exchange")
        self.board.enter()
        try:
            return self._exchange(value, channel, ())
        except TypeError as error:  # json's, before anything was sent
            raise ContractError(
                "world.exchange",
                expected="numbers, texts, None, and lists and dicts of them",
                got=describe_value(value),
                do="Give tensor.item() or .tolist(); world.mean(tensor) averages a tensor over the ranks.",
            ) from error

    @final
    @collective_call("world.mean")
    def mean(self, value: torch.Tensor | float) -> torch.Tensor:
        """Average ``value`` over the ranks, element by element: a loss of each rank's own batches, a metric.

        Nothing is differentiated: what is returned is for the log. Collective: call it on every rank.

        Args:
            value: of the same shape on every rank; any real dtype.

        Returns:
            A new tensor of that shape on ``device``, the same bits on every rank: float64 of float64, else float32.

        Raises:
            CollectiveError: a rank died, aborted, or did not call within ``timeout_s``.
            ContractError: it is no tensor and no number.
            StateError: this process is a forked child of the rank's.

        Example::

            print("loss", world.mean(loss.detach()).item())
        """
        try:
            given = torch.as_tensor(value).detach()
        except (TypeError, ValueError, RuntimeError) as error:
            do = "Give the loss itself; world.exchange(value) hands texts and lists to all ranks."
            raise ContractError(
                "world.mean", expected="a tensor or a number", got=describe_value(value), do=do
            ) from error
        dtype = torch.promote_types(given.dtype, torch.float32)
        total = given.to(self.device, dtype, copy=True).reshape(-1)
        self.communicator(range(self.size), "control-mean").all_reduce(total, tag="world.mean").wait()
        return total.div_(self.size).view(given.shape)

    @property
    def inherited(self) -> bool:
        """Return whether this process is a forked child of the rank's: closing does nothing there, using raises."""
        return self.size > 1 and self._birthplace.left()

    @final
    def abort(self, reason: str) -> None:
        """Break every communicator of this rank; the other ranks' waiting ends with an error."""
        if not self.inherited:
            self.fail(make_abort_failure(self.ranks[self.rank], reason))

    def fail(self, failure: CommunicatorFailure) -> None:
        """Break them likewise, for ``failure``."""
        self.companions.forget()
        for communicator in list(self._communicators.values()):
            communicator.fail(failure)

    @final
    def drain(self) -> None:
        """Finish operations under way, for ranks that still wait: an orderly end is a drain and a close.

        Raises:
            NpuZeroError: what went wrong beside the main thread, and nobody has heard.
        """
        if self.inherited:
            return
        self.companions.end()
        for communicator in list(self._communicators.values()):
            communicator.drain()

    def close(self) -> None:
        """Wait for saves under way, and close every communicator and the parts. Calling it again does nothing.

        Raises:
            NpuZeroError: a save failed, and nobody has heard; the world is closed all the same.
        """
        if self.inherited:
            return
        try:
            self.companions.end()
        finally:
            self._leave()

    def _leave(self) -> None:
        for part in list(self._parts.values()):
            part.closed = True
        self.closed = True
        self.board.close()
        for communicator in list(self._communicators.values()):
            communicator.close()

    @abstractmethod
    def _exchange(self, value: object, channel: str, group: tuple[int, ...]) -> list[Any]:
        """Return the values of the ranks in ``group``, in their order; ``()``: of all. Only they call it."""

    @abstractmethod
    def _make(self, ranks: tuple[int, ...], name: str) -> Communicator:
        """Return a communicator of several ranks, this one among them."""

    def _make_single(self, name: str) -> Communicator:
        """Return a communicator of this rank alone."""
        return SingleCommunicator(self.rank, name, self._place(name))

    def _whole(self) -> World:
        """Return the world that this one is a part of; itself, if of none."""
        return self

    def _place(self, name: str) -> torch.device:
        """Return the device of a channel's tensors."""
        return torch.device("cpu") if _channel_purpose(name) == HOST_CHANNEL else self.device

    def _arrived(self) -> dict[str, int]:
        """Return how often this rank has come to each place."""
        made = list(self._communicators.values())
        return {place: number for each in made for place, number in each.arrived().items()}

    def _check_birthplace(self, subject: str) -> None:
        if self.inherited:
            raise fork.forked_world_error(f"{subject} on rank {self.ranks[self.rank]}")

    def _check_ranks(self, subject: str, ranks: tuple[int, ...]) -> None:
        legal = len(set(ranks)) == len(ranks) and all(0 <= rank < self.size for rank in ranks)
        if not legal or self.rank not in ranks:
            raise ContractError(
                subject,
                expected=f"different ranks below {self.size}, with rank {self.rank} among them",
                got=str(ranks),
                do="Let only members of a group ask for it.",
            )


class SubWorld(World):
    """Represent some ranks of a world; made by :meth:`World.part`.

    Its channels are the enclosing world's under names of their own: the collectives of a model that trains on all ranks
    must not meet those of another on some. Whatever waits or fails does so on the enclosing world's board.
    """

    def __init__(self, whole: World, ranks: tuple[int, ...]) -> None:
        local = [place for place, rank in enumerate(ranks) if rank in whole.local]
        super().__init__(ranks.index(whole.rank), len(ranks), whole.device, local, whole.timeout_s)
        self.ranks = ranks
        self.board, self.companions = whole.board, whole.companions
        self._of = whole

    def __repr__(self) -> str:
        return f"{super().__repr__()[:-1]}, ranks={self.ranks})"

    @property
    def inherited(self) -> bool:
        return self._of.inherited

    def fail(self, failure: CommunicatorFailure) -> None:
        self._of.fail(failure)  # there is one board, and a rank that gave up may be waited for anywhere

    def close(self) -> None:
        """Close the part's communicators; the world it is a part of goes on. Calling it again does nothing."""
        if self.inherited:
            return
        self.closed = True
        for communicator in list(self._communicators.values()):
            communicator.close()

    def _whole(self) -> World:
        return self._of

    def _exchange(self, value: object, channel: str, group: tuple[int, ...]) -> list[Any]:
        return self._of._exchange(value, channel, tuple(self.ranks[rank] for rank in group) or tuple(self.ranks))

    def _make(self, ranks: tuple[int, ...], name: str) -> Communicator:
        return self._of.communicator([self.ranks[rank] for rank in ranks], f"{name}@{_format_rank_range(self.ranks)}")

    def _make_single(self, name: str) -> Communicator:
        return self._make((self.rank,), name)


class SingleWorld(World):
    """Represent one rank alone: no launcher, no backend."""

    def __init__(self, device: torch.device | str = "cpu", timeout_s: float = TIMEOUT_S) -> None:
        super().__init__(0, 1, torch.device(device), (0,), timeout_s)

    def _exchange(self, value: object, channel: str, group: tuple[int, ...]) -> list[Any]:
        return [json.loads(json.dumps(value))]

    def _make(self, ranks: tuple[int, ...], name: str) -> Communicator:
        raise AssertionError("a world of one rank has groups of one rank only")


def _format_rank_range(ranks: Sequence[int]) -> str:
    """Return the ranks of a part in words: in few letters where they are evenly apart, as those of a mesh are."""
    step = ranks[1] - ranks[0] if len(ranks) > 2 else 0
    evenly = step > 0 and list(ranks) == list(range(ranks[0], ranks[-1] + 1, step))
    return f"{ranks[0]}-{ranks[-1]}:{step}" if evenly else "-".join(map(str, ranks))


def _channel_purpose(name: str) -> str:
    """Return the purpose of a channel without the part it belongs to."""
    return name.partition("@")[0]
