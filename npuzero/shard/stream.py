"""The stream of far chunks: fetch, rule, store, on a lane beside the program, which waits for a unit when it needs it.

States that rest beyond the device are updated on the host, chunk by chunk. What of a chunk is not on the host comes
there first: gradients and parameters into a slot of a ring each, states from where their bank has them; the updated
parameters go back to the device. While one chunk is updated the next is on its way, and the one before it goes back.

Two threads share what an update reads and writes, from ``run()`` until the chunk's handle was waited for:

    states           the lane alone; others open a bank's parts, which waits for all of the update (``quiet``)
    own parameters   the lane alone; the unit is closed to reading, and R1, R4 and programs wait for its chunks first
    gradients        the lane reads; see :mod:`npuzero.shard.gradient`
    rings            the lane alone; a slot is filled again when the store of the chunk that had it is done
    numbers          copies: of the scale, the skip and the rows that the device computed; lr and steps are in segments

The lane runs its chunks in order. After one that failed none is run: what it raised is raised by every wait from then
on, so that no step begins on states of which some are a step behind.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, NoReturn

import torch
from torch import Tensor

from npuzero import observe
from npuzero.comm.fork import door
from npuzero.device import Handle, HostLane
from npuzero.errors import NpuZeroError, StateError
from npuzero.memory import Mover, Ring, Spaces
from npuzero.plan import FROM_DISK, RING_SLOTS, TO_DISK, Memory
from npuzero.shard.bank import Bank
from npuzero.shard.chunks import Chunk, Piece
from npuzero.shard.flat import Flat
from npuzero.shard.unit import Unit


class Staged(NamedTuple):
    """Hold what the update of a piece reads and writes, all of it on the host.

    Attributes:
        gradient: float32.
        parameter: own parameters, which are to be updated; undefined where they are copies of float32 masters.
        states: as they are stored, by name.
    """

    piece: Piece
    gradient: Tensor
    parameter: Tensor
    states: Mapping[str, Tensor]

    @property
    def master(self) -> Tensor:
        """Return what the rule updates: float32 masters, or the parameters."""
        return self.states.get("master", self.parameter)

    @property
    def low(self) -> Tensor | None:
        """Return what gets rounded copies of float32 masters, where these are kept beside the parameters."""
        return self.parameter if "master" in self.states else None


class Numbers(NamedTuple):
    """Hold what the device has computed for an update, as :meth:`npuzero.ops.Line.update` takes it, on the host."""

    scale: Tensor
    skip: Tensor | None
    dynamic: Tensor | None


@dataclass
class _Job:
    """Run one update, on the lane; it knows nothing of the stream, which may be gone before it ends."""

    chunks: Sequence[Chunk]
    gradients: Mapping[Flat, Tensor]  # of the flats that are updated
    banks: Sequence[Bank]
    staging: Sequence[Ring]  # of gradients, of parameters
    mover: Mover
    on_device: bool
    numbers: Numbers
    taken: Sequence[Handle]  # of the numbers
    launch: Callable[[Sequence[Staged], Numbers], None]
    rank: int
    threads: int
    failed: BaseException | None = None
    begun: dict[int, tuple[list[Staged], list[Handle]]] = field(default_factory=dict)
    storing: dict[int, list[Handle]] = field(default_factory=dict)

    def run(self, k: int) -> None:
        """Update chunk ``k``, once those before it are."""
        if self.failed is not None:
            raise self.failed
        observe.set_rank(self.rank)
        try:
            self.mover.attend()
            if torch.get_num_threads() != self.threads:
                torch.set_num_threads(self.threads)  # of this thread: kernels obey it
            with observe.span("update chunk", str(k)):
                self._run(k)
        except BaseException as error:
            self._fail(error)

    def finish(self) -> None:
        """Wait until everything is where it rests."""
        if self.failed is not None:
            raise self.failed
        try:
            for k in list(self.storing):
                self._stored(k)
        except BaseException as error:
            self._fail(error)

    def _fail(self, error: BaseException) -> NoReturn:
        if isinstance(error, NpuZeroError):
            self.failed = error
            raise error
        self.failed = _broken(error)
        raise self.failed from error

    def _run(self, k: int) -> None:
        if self._skipped():
            return
        for ahead in (k, k + 1):
            if ahead < len(self.chunks) and ahead not in self.begun:
                self.begun[ahead] = self._begin(ahead)
        staged, handles = self.begun.pop(k)
        for handle in handles:
            handle.wait()
        if not staged:
            return
        states = [bank.views(k) for bank in self.banks]
        number = {id(piece.flat): i for i, piece in enumerate(self.chunks[k].pieces)}
        whole = [
            each._replace(states={n: t for views in states for n, t in views[number[id(each.piece.flat)]].items()})
            for each in staged
        ]
        self.launch(whole, self.numbers)
        self.mover.moved[TO_DISK] += sum(bank.extent_bytes(k) for bank in self.banks)
        self.storing[k] = [bank.store(k) for bank in self.banks]
        for arrived in [] if self.on_device else [self.mover.to_device(_own(e.piece), e.parameter) for e in staged]:
            arrived.wait()

    def _skipped(self) -> bool:
        for handle in self.taken:
            handle.wait()
        return self.numbers.skip is not None and self.numbers.skip.item() != 0

    def _begin(self, k: int) -> tuple[list[Staged], list[Handle]]:
        """Begin to bring chunk ``k`` to the host, all of it that is updated."""
        if k >= RING_SLOTS:
            self._stored(k - RING_SLOTS)
        pieces = [piece for piece in self.chunks[k].pieces if piece.flat in self.gradients]
        if self.on_device:
            staged = [Staged(piece, self._gradient(piece), _own(piece), {}) for piece in pieces]
            handles: list[Handle] = []
        else:
            staged, handles = self._stage(k, pieces)
        if staged:
            self.mover.moved[FROM_DISK] += sum(bank.extent_bytes(k) for bank in self.banks)
            handles += [bank.fetch(k) for bank in self.banks]
        return staged, handles

    def _stage(self, k: int, pieces: Sequence[Piece]) -> tuple[list[Staged], list[Handle]]:
        """Begin to copy gradients and parameters of chunk ``k`` to the host."""
        handles: list[Handle] = []
        staged: list[Staged] = []
        begins = [0, 0]
        for piece in pieces:
            numel, own, gradient = piece.end - piece.begin, _own(piece), self._gradient(piece)
            if piece.flat.rests.gradients.memory is Memory.DEVICE:
                slot = _cut(self.staging[0].slot(k), begins, 0, numel, torch.float32)
                handles.append(self.mover.to_host(slot, gradient))
                gradient = slot
            parameter = _cut(self.staging[1].slot(k), begins, 1, numel, own.dtype)
            if piece.flat.low is None:
                handles.append(self.mover.to_host(parameter, own))
            staged.append(Staged(piece, gradient, parameter, {}))
        return staged, handles

    def _gradient(self, piece: Piece) -> Tensor:
        return self.gradients[piece.flat][piece.begin : piece.end]

    def _stored(self, k: int) -> None:
        for handle in self.storing.pop(k, ()):
            handle.wait()


def _own(piece: Piece) -> Tensor:
    return piece.flat.own_parameters[piece.begin : piece.end]


def _cut(slot: Tensor, begins: list[int], which: int, numel: int, dtype: torch.dtype) -> Tensor:
    """Return the next ``numel`` elements of a slot."""
    begin = begins[which]
    begins[which] += numel * dtype.itemsize
    return slot[begin : begins[which]].view(dtype)


def _broken(error: BaseException) -> NpuZeroError:
    return StateError(
        "update of states that rest on the host",
        expected="to run to its end",
        got=f"{type(error).__name__}: {error}",
        do="Some states are a step behind others now: start again from the last checkpoint.",
    )


class Stream:
    """Run the far part of a model's updates, one after the other.

    Args:
        units: in forward order.
        chunks: the far shards of the model's flats, divided for good.
        overlap: False ends each update within its step.
        on_device: the device's kernels update, and read and write the host's memory where it is.
    """

    def __init__(
        self, units: Sequence[Unit], chunks: Sequence[Chunk], spaces: Spaces, *, overlap: bool, on_device: bool
    ) -> None:
        self.chunks = chunks
        self.mover = Mover(spaces[Memory.DEVICE].device)
        self._spaces = spaces
        self._overlap = overlap
        self._on_device = on_device
        self._staging: list[Ring] = []
        last = {id(piece.flat): k for k, chunk in enumerate(chunks) for piece in chunk.pieces}
        # By unit the last chunk that has anything of it.
        self._last = {
            unit.index: max(last[id(flat)] for flat in unit.trainable if flat.far)
            for unit in units
            if any(flat.far for flat in unit.trainable)
        }
        self._handles: list[Handle] = []
        self._lane = HostLane("update", door("an update"))
        weakref.finalize(self, self._lane.close, 0.0)

    def run(
        self,
        flats: Collection[Flat],
        banks: Sequence[Bank],
        launch: Callable[[Sequence[Staged], Numbers], None],
        scale: Tensor,
        skip: Tensor | None,
        dynamic: Tensor | None,
    ) -> None:
        """Begin to update the far shards of ``flats``; nothing else is under way.

        Args:
            banks: that have their states.
            launch: updates pieces that are on the host, all of one chunk; called on the lane.
            scale, skip, dynamic: on the device; they may change meanwhile.
        """
        self._stage()
        for bank in banks:
            bank.settle()
        self.mover.moved.clear()
        self.mover.follow()
        gradients = {flat: flat.own_gradient for flat in flats}
        numbers, taken = self._snapshot(scale, skip, dynamic)
        how = self._staging, self.mover, self._on_device
        here = observe.current_rank(), torch.get_num_threads()
        job = _Job(self.chunks, gradients, banks, *how, numbers, taken, launch, *here)
        for k in range(len(self.chunks)):
            self._queue(job, k)
        self._handles.append(self._lane.run(job.finish))
        if not self._overlap:
            self.quiet()

    def _snapshot(self, scale: Tensor, *others: Tensor | None) -> tuple[Numbers, list[Handle]]:
        copy, taken = self.mover.snapshot(scale)
        copies = [(None, None) if other is None else self.mover.snapshot(other) for other in others]
        handles = [taken, *(handle for _, handle in copies if handle is not None)]
        return Numbers(copy, *(other for other, _ in copies)), handles

    def _queue(self, job: _Job, k: int) -> None:
        self._handles.append(self._lane.run(lambda: job.run(k)))

    def _stage(self) -> None:
        """Make the rings that chunks go through, at the first update."""
        if self._staging or not self.chunks or self._on_device:
            return
        pieces = [chunk.pieces for chunk in self.chunks]
        gradients = max(
            sum(4 * (end - begin) for flat, begin, end in some if flat.rests.gradients.memory is Memory.DEVICE)
            for some in pieces
        )
        parameters = max(sum((end - begin) * flat.dtype.itemsize for flat, begin, end in some) for some in pieces)
        slots = min(RING_SLOTS, len(self.chunks))
        self._staging = [Ring(self._spaces.host, nbytes, slots) for nbytes in (gradients, parameters)]

    # -- waiting ---------------------------------------------------------------------------------------------------

    @property
    def busy(self) -> bool:
        """Return whether there is an update that nobody has waited for to its end."""
        return bool(self._handles)

    def has(self, unit: Unit) -> bool:
        """Tell whether such an update has anything of ``unit``."""
        return self.busy and unit.index in self._last

    def done(self, unit: Unit) -> bool:
        """Tell whether :meth:`wait` would return at once."""
        return not self.has(unit) or self._handles[self._last[unit.index]].done()

    def wait(self, unit: Unit) -> None:
        """Wait until the parameters of ``unit`` are updated.

        Raises:
            NpuZeroError: the update has failed.
        """
        if self.has(unit):
            self._handles[self._last[unit.index]].wait()

    def quiet(self) -> None:
        """Wait until the update is done, and all states are where they rest.

        Raises:
            NpuZeroError: it has failed.
        """
        if self._handles:
            with observe.span("wait for update", ""):
                self._handles[-1].wait()
            self._handles = []

    def moved(self) -> Counter[str]:
        """Return the bytes that the last update has moved, by link; waits for its end."""
        self.quiet()
        return self.mover.moved
