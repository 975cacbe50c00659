"""Define worlds: ranks of a run that work together, and the communicators between them.

A world has all ranks of a run, or a part of them: ``world.part(ranks)`` is another world, for training another model.
Ranks count from 0 in each world; ``ranks`` gives their ranks in the run, which errors, events and communicators use.
The subclass of the run's world (``process_world.py``, ``loopback.py``) connects the ranks, also for its parts.
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

#: Channel with tensors on the host for any device. It carries values that the host needs within a step: reading a
#: device tensor would wait for all work issued before.
HOST_CHANNEL = "host"


class World(ABC):
    """Represent ranks that work together, as seen from one of them.

    Attributes:
        rank, size: this rank's index, and the number of ranks.
        ranks: their ranks in the run: all, in order, unless this is a part.
        device: of this rank's tensors.
        local: ranks of this world on this rank's host.
        timeout_s: seconds before a waiting collective gives up.
        board: the status board, where this rank posts its waits, and reads the waits of all ranks.
        companions: users of the world in background threads; the end of the world waits for them.
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
        """Return the communicator of ``ranks``, in that order, for the purpose ``name``: the same object each time.

        Members create communicators of equal ranks in the same order. The purpose is any word, and names a channel:
        operations on different channels do not disturb each other. Tensors are on the world's device, or on the host
        for ``HOST_CHANNEL``. Channels with names that begin with ``control`` are expected to carry small messages.

        Raises:
            ContractError: a rank is named twice, is not in the world, or this rank is missing.
            CollectiveError: it cannot be made.
            StateError: this process is a forked child of the rank.
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

        Its members call it, other ranks need not, and the call does not wait. The part has separate communicators and
        exchanges, but this world's device, timeout and board: a deadlock across different parts is detected. It closes
        with this world, and an abort of either aborts both. A part of a part is a part of the run. All ranks in order
        give the run's world.

        Raises:
            ContractError: a rank is named twice, is not in the world, or this rank is missing.
            StateError: this process is a forked child of the rank.
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
        """Send a small ``value`` of JSON's types to all ranks, and return all values, by rank; every rank must call it.

        Exchanges on different channels do not disturb each other; a background thread uses a separate channel::

            mean = sum(world.exchange(loss.item())) / world.size  # the loss's mean over all ranks

        Raises:
            CollectiveError: a rank died, aborted, or did not call within ``timeout_s``.
            ContractError: JSON has no such type.
            StateError: this process is a forked child of the rank.
        """
        self._check_birthplace("exchange")
        self.board.enter()
        try:
            return self._exchange(value, channel, ())
        except TypeError as error:  # from json, before anything is sent
            raise ContractError(
                "world.exchange",
                expected="numbers, texts, None, and lists and dicts of them",
                got=describe_value(value),
                do="Give tensor.item() or .tolist(); world.mean(tensor) averages a tensor over the ranks.",
            ) from error

    @final
    @collective_call("world.mean")
    def mean(self, value: torch.Tensor | float) -> torch.Tensor:
        """Average ``value`` over the ranks, element by element: a metric, or the loss of each rank's batches.

        The result is not differentiable: use it for logs. Collective: call it on every rank.

        Args:
            value: of the same shape on every rank; any real dtype.

        Returns:
            A new tensor of that shape on ``device``, the same bits on every rank: float64 for float64, else float32.

        Raises:
            CollectiveError: a rank died, aborted, or did not call within ``timeout_s``.
            ContractError: it is no tensor and no number.
            StateError: this process is a forked child of the rank.

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
        """Return whether this is a forked child of the rank: there ``close`` does nothing, and collectives raise."""
        return self.size > 1 and self._birthplace.left()

    @final
    def abort(self, reason: str) -> None:
        """Break every communicator of this rank; other ranks that wait for it raise an error."""
        if not self.inherited:
            self.fail(make_abort_failure(self.ranks[self.rank], reason))

    def fail(self, failure: CommunicatorFailure) -> None:
        """Break every communicator of this rank with ``failure``."""
        self.companions.forget()
        for communicator in list(self._communicators.values()):
            communicator.fail(failure)

    @final
    def drain(self) -> None:
        """Finish operations in progress, for ranks that still wait. An orderly end is a drain and a close.

        Raises:
            NpuZeroError: an error of a background thread that was not raised before.
        """
        if self.inherited:
            return
        self.companions.end()
        for communicator in list(self._communicators.values()):
            communicator.drain()

    def close(self) -> None:
        """Wait for saves in progress, and close every communicator and the parts. Idempotent.

        Raises:
            NpuZeroError: a save failed, and its error was not raised before; the world is closed nevertheless.
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
        """Return the values of the ranks in ``group``, in their order; ``()``: of all. Only these ranks call it."""

    @abstractmethod
    def _make(self, ranks: tuple[int, ...], name: str) -> Communicator:
        """Return a communicator of several ranks, including this one."""

    def _make_single(self, name: str) -> Communicator:
        """Return a communicator of this rank only."""
        return SingleCommunicator(self.rank, name, self._place(name))

    def _whole(self) -> World:
        """Return the run's world if this one is a part, else itself."""
        return self

    def _place(self, name: str) -> torch.device:
        """Return the device of a channel's tensors."""
        return torch.device("cpu") if _channel_purpose(name) == HOST_CHANNEL else self.device

    def _arrived(self) -> dict[str, int]:
        """Return the number of operations that this rank has started at each place."""
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

    Its channels are channels of the enclosing world with different names: collectives of a model on all ranks must not
    match another model's on some ranks. Waits and failures go to the enclosing world's board.
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
        self._of.fail(failure)  # the board is shared, and ranks of any part may wait for a rank that gave up

    def close(self) -> None:
        """Close the part's communicators; the enclosing world stays open. Idempotent."""
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
    """Represent a single rank: no launcher, no backend."""

    def __init__(self, device: torch.device | str = "cpu", timeout_s: float = TIMEOUT_S) -> None:
        super().__init__(0, 1, torch.device(device), (0,), timeout_s)

    def _exchange(self, value: object, channel: str, group: tuple[int, ...]) -> list[Any]:
        return [json.loads(json.dumps(value))]

    def _make(self, ranks: tuple[int, ...], name: str) -> Communicator:
        raise AssertionError("a world of one rank has groups of one rank only")


def _format_rank_range(ranks: Sequence[int]) -> str:
    """Return the ranks of a part as text: short for evenly spaced ranks, as along a mesh axis."""
    step = ranks[1] - ranks[0] if len(ranks) > 2 else 0
    evenly = step > 0 and list(ranks) == list(range(ranks[0], ranks[-1] + 1, step))
    return f"{ranks[0]}-{ranks[-1]}:{step}" if evenly else "-".join(map(str, ranks))


def _channel_purpose(name: str) -> str:
    """Return the purpose of a channel without the suffix of a part."""
    return name.partition("@")[0]
