"""The stream of far chunks: fetch, rule, store, on a lane beside the program, which waits for a unit when it needs it.

States that rest beyond the device are updated on the host, chunk by chunk. What of a chunk is not on the host comes
there first: gradients and parameters into a slot of a ring each, states from where their bank has them; the updated
parameters go back to the device. While one chunk is updated the next is on its way, and the one before it goes back.

Two threads share what an update reads and writes, from ``run()`` until the chunk's handle was waited for:

    states           the lane alone; others open a bank's parts, which waits for all of the update (``quiet``)
    own parameters   the lane alone; the unit is closed to reading, and R1, R4 and programs wait for its chunks first;
                     where updates are delayed the lane has others instead: see
                         :mod:`npuzero.shard.offload.delayed_update`
    gradients        the lane reads; see :mod:`npuzero.shard.state.flat_gradient`
    rings            the lane alone; a slot is filled again when the store of the chunk that had it is done
    numbers          copies: of the scale, the skip and the rows that the device computed; lr and steps are in segments

Of the chunks whose gradients are there the lane takes the first of the model next, for that is what the forward pass
will want first; so all are in their order, unless an update begins inside backward
(:mod:`npuzero.shard.step.early_update`). A slot of a ring goes by the turn. When all is stored the first chunks come
back for the next update, as many as the ring has room for. After a chunk that failed none is run: what it raised is
raised by every wait from then on, so that no step begins on states of which some are a step behind.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from queue import PriorityQueue
from typing import NamedTuple, NoReturn

import torch
from torch import Tensor

from npuzero import observe
from npuzero.comm.watchdog.fork import make_fork_check
from npuzero.device import AsyncHandle, HostLane
from npuzero.errors import NpuZeroError, StateError
from npuzero.memory import BufferRing, HostCopier, MemorySpaces
from npuzero.plan import FROM_DISK, RING_SLOTS, TO_DISK, Memory
from npuzero.shard.offload.chunks import ShardPiece, UpdateChunk
from npuzero.shard.offload.host_states import StateStore, Views
from npuzero.shard.state.flat_parameter import AHEAD, PARAMETERS, FlatParameter
from npuzero.shard.state.unit import Unit


class StagedChunk(NamedTuple):
    """Hold what the update of a piece reads and writes, all of it where the update runs.

    Attributes:
        gradient: float32.
        parameter: own parameters, which are to be updated; undefined where they are copies of float32 masters.
        states: as they are stored, by name.
    """

    piece: ShardPiece
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


class UpdateScalars(NamedTuple):
    """Hold what the device has computed for an update, as :meth:`npuzero.ops.AdamLine.update` takes it: copies, where
    the update runs.
    """

    scale: Tensor
    skip: Tensor | None
    dynamic: Tensor | None


#: Updates pieces that are on the host, all of one chunk.
Launch = Callable[[Sequence[StagedChunk], UpdateScalars], None]


@dataclass
class _UpdateJob:
    """Run one update, on the lane; it knows nothing of the stream, which may be gone before it ends.

    What the program adds to it (chunks that are ready, gradients of their flats) is there before a turn is queued.
    """

    chunks: Sequence[UpdateChunk]
    banks: Sequence[StateStore]
    staging: Sequence[BufferRing]  # of gradients, of parameters
    mover: HostCopier
    on_device: bool
    lag: bool
    numbers: UpdateScalars
    skip: Tensor | None  # of the numbers, on the host
    taken: Sequence[AsyncHandle]  # of the numbers
    launch: Launch
    rank: int
    threads: int
    gradients: dict[FlatParameter, Tensor] = field(default_factory=dict)  # of the flats that are updated
    ready: PriorityQueue[int] = field(default_factory=PriorityQueue)  # chunks that have no turn yet
    order: list[int] = field(default_factory=list)  # of chunks, so far: the place of one is its turn
    updated: set[int] = field(default_factory=set)  # chunks
    ended: int = 0  # turns
    closed: bool = False  # no more are to come
    failed: BaseException | None = None
    # By turn: what is on its way to the host, and back.
    begun: dict[int, tuple[list[StagedChunk], list[AsyncHandle]]] = field(default_factory=dict)
    storing: dict[int, list[AsyncHandle]] = field(default_factory=dict)
    read: dict[int, list[StateStore]] = field(default_factory=dict)  # for the first turns, one for each slot of a ring

    def run(self, turn: int) -> None:
        """Update the next chunk, once those before it are."""
        if self.failed is not None:
            raise self.failed
        observe.set_rank(self.rank)
        try:
            self.mover.attend()
            if torch.get_num_threads() != self.threads:
                torch.set_num_threads(self.threads)  # of this thread: kernels obey it
            self._run(turn)
        except BaseException as error:
            self._fail(error)
        self.ended = turn + 1

    @property
    def _in_place(self) -> bool:
        """Return whether gradients and parameters are updated where they rest, and nothing is staged."""
        return self.on_device or self.lag

    def finish(self) -> None:
        """Wait until everything is where it rests; begin to bring what the next update will read first."""
        if self.failed is not None:
            raise self.failed
        try:
            for turn in list(self.storing):
                self._stored(turn)
            for turn, banks in self.read.items():
                for bank in banks:
                    bank.foresee(self.order[turn], turn)
        except BaseException as error:
            self._fail(error)

    def _fail(self, error: BaseException) -> NoReturn:
        if isinstance(error, NpuZeroError):
            self.failed = error
            raise error
        self.failed = _broken_update_error(error)
        raise self.failed from error

    def _run(self, turn: int) -> None:
        for bank in self.banks if turn == 0 else ():
            bank.settle()  # here, so that no step follows where it fails
        if self._skipped():
            return
        for ahead in (turn, turn + 1):
            if ahead not in self.begun and not self.ready.empty():
                self.begun[ahead] = self._begin(ahead)
        with observe.span("update chunk", str(self.order[turn])):
            self._update(self.order[turn], turn)
        self.updated.add(self.order[turn])

    def _update(self, k: int, turn: int) -> None:
        staged, handles = self.begun.pop(turn)
        for handle in handles:
            handle.wait()
        if not staged:
            return
        states = [bank.views(k, turn) for bank in self.banks]
        number = {id(piece.flat): i for i, piece in enumerate(self.chunks[k].pieces)}
        whole = [_add_stored_states(each, [views[number[id(each.piece.flat)]] for views in states]) for each in staged]
        self._launch(whole)
        self.mover.moved[TO_DISK] += sum(bank.extent_bytes(k) for bank in self.banks)
        self.storing[turn] = [bank.store(k, turn) for bank in self.banks]
        for arrived in (
            []
            if self._in_place
            else [self._to_device(each) for each in staged if not _parameters_offloaded(each.piece)]
        ):
            arrived.wait()

    def _launch(self, staged: Sequence[StagedChunk]) -> None:
        if not self.on_device:
            self.launch(staged, self.numbers)
            return
        reach = self.mover.reach
        there = [
            each._replace(
                gradient=reach(each.gradient),
                parameter=reach(each.parameter),
                states={name: reach(state) for name, state in each.states.items()},
            )
            for each in staged
        ]
        with self.mover.beside():
            self.launch(there, self.numbers)
        self.mover.quiet()

    def _skipped(self) -> bool:
        for handle in self.taken:
            handle.wait()
        return self.skip is not None and self.skip.item() != 0

    def _begin(self, turn: int) -> tuple[list[StagedChunk], list[AsyncHandle]]:
        """Choose the chunk of a turn, and begin to bring it to the host, all of it that is updated."""
        if turn >= RING_SLOTS:
            self._stored(turn - RING_SLOTS)
        k = self.ready.get()
        self.order.append(k)
        pieces = [piece for piece in self.chunks[k].pieces if piece.flat in self.gradients]
        if self._in_place:
            staged = [StagedChunk(piece, self._gradient(piece), _own_parameters(piece), {}) for piece in pieces]
            handles: list[AsyncHandle] = []
        else:
            staged, handles = self._stage(turn, pieces)
        if staged:
            every = len(pieces) == len(self.chunks[k].pieces)
            read = [bank for bank in self.banks if bank.reads(k, every)]
            self.mover.moved[FROM_DISK] += sum(bank.extent_bytes(k) for bank in read)
            handles += [bank.fetch(k, turn) for bank in read]
            if turn < RING_SLOTS:
                self.read[turn] = read
            handles += [each.piece.flat.gradient.kept.arrived for each in staged]
        return staged, handles

    def _stage(self, turn: int, pieces: Sequence[ShardPiece]) -> tuple[list[StagedChunk], list[AsyncHandle]]:
        """Begin to copy gradients and parameters of a chunk to the host."""
        handles: list[AsyncHandle] = []
        staged: list[StagedChunk] = []
        begins = [0, 0]
        for piece in pieces:
            numel, own, gradient = piece.end - piece.begin, _own_parameters(piece), self._gradient(piece)
            if piece.flat.rests.gradients.memory is Memory.DEVICE:
                slot = _take_elements(self.staging[0].slot(turn), begins, 0, numel, torch.float32)
                handles.append(self.mover.to_host(slot, gradient))
                gradient = slot
            parameter = (
                own
                if _parameters_offloaded(piece)
                else _take_elements(self.staging[1].slot(turn), begins, 1, numel, own.dtype)
            )
            if piece.flat.masters != "fp32" and not _parameters_offloaded(piece):
                handles.append(self.mover.to_host(parameter, own))
            staged.append(StagedChunk(piece, gradient, parameter, {}))
        return staged, handles

    def _to_device(self, staged: StagedChunk) -> AsyncHandle:
        return self.mover.to_device(_own_parameters(staged.piece), staged.parameter)

    def _gradient(self, piece: ShardPiece) -> Tensor:
        return self.gradients[piece.flat][piece.begin : piece.end]

    def _stored(self, turn: int) -> None:
        for handle in self.storing.get(turn, ()):
            handle.wait()
        self.storing.pop(turn, None)

    def landing(self, k: int) -> Sequence[AsyncHandle]:
        """Return what is on its way to where it rests, of a chunk that is updated; any thread may ask, and wait."""
        return self.storing.get(self.order.index(k), ()) if k in self.updated else ()


def _own_parameters(piece: ShardPiece) -> Tensor:
    """Return own parameters of a piece; nothing where they rest on a disk, and come with the states."""
    if piece.flat.rests.parameters.memory is Memory.NVME:
        return torch.empty(0, dtype=piece.flat.dtype)
    return piece.flat.own_parameters[piece.begin : piece.end]


def _parameters_offloaded(piece: ShardPiece) -> bool:
    """Return whether the parameters rest where they are updated."""
    return piece.flat.rests.parameters.far


def _add_stored_states(staged: StagedChunk, found: Sequence[Views]) -> StagedChunk:
    """Return a piece with its states, and parameters if banks have them: on a disk, or where updates are delayed."""
    states = {name: tensor for views in found for name, tensor in views.items()}
    parameter = states.pop(PARAMETERS, states.pop(AHEAD, staged.parameter))
    return staged._replace(parameter=parameter, states=states)


def _take_elements(slot: Tensor, begins: list[int], which: int, numel: int, dtype: torch.dtype) -> Tensor:
    """Return the next ``numel`` elements of a slot."""
    begin = begins[which]
    begins[which] += numel * dtype.itemsize
    return slot[begin : begins[which]].view(dtype)


def _broken_update_error(error: BaseException) -> NpuZeroError:
    return StateError(
        "update of states that rest on the host",
        expected="to run to its end",
        got=f"{type(error).__name__}: {error}",
        do="Some states are a step behind others now: start again from the last checkpoint.",
    )


def _unfinished_update_error() -> StateError:
    """Return the error of who comes between an update that has begun inside backward, and the step that ends it."""
    return StateError(
        "an update that has begun inside backward (early=True)",
        expected="step() of its optimizer next: a part of the model is updated, the rest is not",
        got="another forward or backward pass, a read or write of parameters or states, or zero_grad()",
        do="If the step has more micro-batches, run all but its last backward within npuzero.no_sync(model), or say "
        "how many backward passes a step has: early=4. If backward has raised, start again from the last checkpoint.",
    )


class OffloadedUpdate:
    """Run the far part of a model's updates, one after the other.

    Args:
        units: in forward order.
        chunks: the far shards of the model's flats, divided for good.
        overlap: False ends each update within its step.
        on_device: the device's kernels update, and read and write the host's memory where it is.
        lag: nobody waits for the parameters of an update: the next step brings them to the device.
    """

    def __init__(
        self,
        units: Sequence[Unit],
        chunks: Sequence[UpdateChunk],
        spaces: MemorySpaces,
        *,
        overlap: bool,
        on_device: bool,
        lag: bool = False,
    ) -> None:
        self.chunks = chunks
        self.mover = HostCopier(spaces[Memory.DEVICE].device)
        self._spaces = spaces
        self._overlap = overlap
        self._on_device = on_device
        self._lag = lag
        self._staging: list[BufferRing] = []
        self._unit_of = {flat: unit.index for unit in units for flat in unit.trainable if flat.far}
        self._of: dict[int, list[int]] = {index: [] for index in self._unit_of.values()}  # the chunks with any of it
        for k, chunk in enumerate(chunks):
            for index in {self._unit_of[piece.flat] for piece in chunk.pieces}:
                self._of[index].append(k)
        self._filed = {unit.index for unit in units if unit.plan.parameters.memory is Memory.NVME}
        self._job: _UpdateJob | None = None  # until it was waited for to its end
        self._queued: set[int] = set()  # chunks
        self._turns: list[AsyncHandle] = []  # and the end
        self._lane = HostLane("update", make_fork_check("an update"))
        weakref.finalize(self, self._lane.close, 0.0)

    def run(
        self,
        flats: Collection[FlatParameter],
        banks: Sequence[StateStore],
        launch: Launch,
        scale: Tensor,
        skip: Tensor | None,
        dynamic: Tensor | None,
    ) -> None:
        """Begin to update the far shards of ``flats``, or of those that are not under way yet (:meth:`open`).

        Args:
            banks: that have their states.
            launch: updates pieces that are on the host, all of one chunk; called on the lane.
            scale, skip, dynamic: on the device; they may change meanwhile.
        """
        job = self._job or self.open(banks, launch, scale, skip, dynamic)
        job.launch = launch
        self.mover.follow()
        job.gradients |= {flat: flat.gradient.kept.give() for flat in flats if flat not in job.gradients}
        for k in range(len(self.chunks)):
            if k not in self._queued:
                self._queue(job, k)
        job.closed = True
        self._turns.append(self._lane.run(job.finish))
        if not self._overlap:
            self.quiet()

    def open(
        self, banks: Sequence[StateStore], launch: Launch, scale: Tensor, skip: Tensor | None, dynamic: Tensor | None
    ) -> _UpdateJob:
        """Prepare an update, whose flats come one by one (:meth:`add`) until :meth:`run` has the rest; nothing else is
        under way.
        """
        self._stage()
        self.mover.moved.clear()
        there = UpdateScalars(scale.clone(), *(None if other is None else other.clone() for other in (skip, dynamic)))
        self.mover.follow()
        numbers, taken = self._snapshot(scale, skip, dynamic)
        how = self._staging, self.mover, self._on_device, self._lag
        here = observe.current_rank(), torch.get_num_threads()
        used = there if self._on_device else numbers
        self._job = _UpdateJob(self.chunks, banks, *how, used, numbers.skip, taken, launch, *here)
        return self._job

    def add(self, flat: FlatParameter) -> None:
        """Update a flat, whose gradient is there, as soon as the other flats of its chunks are added, too."""
        assert self._job is not None
        gradients = self._job.gradients
        self.mover.follow()
        gradients[flat] = flat.own_gradient
        for k in self._of[self._unit_of[flat]]:
            if k not in self._queued and all(piece.flat in gradients for piece in self.chunks[k].pieces):
                self._queue(self._job, k)

    def _snapshot(self, scale: Tensor, *others: Tensor | None) -> tuple[UpdateScalars, list[AsyncHandle]]:
        copy, taken = self.mover.snapshot(scale)
        copies = [(None, None) if other is None else self.mover.snapshot(other) for other in others]
        handles = [taken, *(handle for _, handle in copies if handle is not None)]
        return UpdateScalars(copy, *(other for other, _ in copies)), handles

    def _queue(self, job: _UpdateJob, k: int) -> None:
        turn = len(self._turns)
        self._queued.add(k)
        job.ready.put(k)
        self._turns.append(self._lane.run(lambda: job.run(turn)))

    def _stage(self) -> None:
        """Make the rings that chunks go through, at the first update."""
        if self._staging or not self.chunks or self._on_device or self._lag:
            return
        pieces = [chunk.pieces for chunk in self.chunks]
        gradients = max(
            sum(4 * (end - begin) for flat, begin, end in some if flat.rests.gradients.memory is Memory.DEVICE)
            for some in pieces
        )
        parameters = max(
            sum(
                (piece.end - piece.begin) * piece.flat.dtype.itemsize
                for piece in some
                if not _parameters_offloaded(piece)
            )
            for some in pieces
        )
        slots = min(RING_SLOTS, len(self.chunks))
        self._staging = [BufferRing(self._spaces.host, nbytes, slots) for nbytes in (gradients, parameters)]

    # -- waiting ---------------------------------------------------------------------------------------------------

    @property
    def busy(self) -> bool:
        """Return whether there is an update that nobody has waited for to its end."""
        return self._job is not None

    @property
    def waits(self) -> bool:
        """Return whether there is an update that began inside backward, and that no step has ended."""
        return self._job is not None and not self._job.closed

    def has(self, unit: Unit) -> bool:
        """Tell whether such an update has anything of ``unit``."""
        return self.busy and not self._lag and unit.index in self._of

    def done(self, unit: Unit) -> bool:
        """Tell whether :meth:`wait` would return at once."""
        return all(handle.done() for handle in self._updates(unit))

    def wait(self, unit: Unit) -> None:
        """Wait until the parameters of ``unit`` are updated.

        Raises:
            NpuZeroError: the update has failed.
        """
        for handle in self._updates(unit):
            handle.wait()

    def _updates(self, unit: Unit) -> Iterator[AsyncHandle]:
        """Yield what is to be waited for until the parameters of ``unit`` are updated, one by one."""
        job, turns = self._job, self._turns
        if job is None or not self.has(unit):
            return
        for k in self._of[unit.index]:
            if k not in self._queued:
                continue
            # Which turn a chunk gets is not known before it has it; in a step that is skipped none gets any.
            for turn in range(job.ended, len(turns)):
                if k not in job.updated:
                    yield turns[turn]
            if unit.index in self._filed:  # R1 reads them from there
                yield from job.landing(k)

    def quiet(self) -> None:
        """Wait until the update is done, and all states are where they rest.

        Raises:
            NpuZeroError: it has failed, or waits for the step that is to end it.
        """
        if self._job is not None:
            self.check()
            if self.waits:
                raise _unfinished_update_error()
            with observe.span("wait for update", ""):
                self._turns[-1].wait()
            self._job = None
            self._queued, self._turns = set(), []

    def check(self) -> None:
        """Raise what an update has failed by, if one has.

        Raises:
            NpuZeroError: it has.
        """
        if self._job is not None and self._job.failed is not None:
            raise self._job.failed

    def moved(self) -> Counter[str]:
        """Return the bytes that the last update has moved, by link; waits for its end."""
        self.quiet()
        return self.mover.moved
