"""Update offloaded states chunk by chunk (fetch, rule, store) on a lane that overlaps with the program.

Gradients and parameters of a chunk are copied into ring slots on the host, and states are fetched from their store;
updated parameters go back to the device. The fetch of the next chunk and the store of the previous one overlap with the
update. The program waits for a unit's chunks when it needs the unit.

From ``run()`` until a chunk's handle has been waited for, two threads share the data of an update:

    states           lane only; other code opens a store's ranges, which waits for the complete update (``quiet``)
    own parameters   lane only; R1, R4 and readers wait for the chunks of the unit; ``delayed_update.py`` writes copies
    gradients        lane reads; see :mod:`npuzero.shard.state.flat_gradient`
    rings            lane only; a slot is reused after the store of its previous chunk is done
    numbers          copies of the scale, the skip flag and the rows from the device; lr and steps are in segments

Of the chunks with complete gradients the lane takes the first in model order, because forward needs it first. So chunks
run in order, unless an update begins inside backward (:mod:`npuzero.shard.step.early_update`). A chunk's turn selects
its ring slot. After the last store, as many first chunks as the ring holds are prefetched for the next update. After a
chunk fails no chunk runs: every later wait raises its error, so no step begins while some states are a step behind.
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
    """Hold the tensors that the update of a piece reads and writes, in the memory where the update runs.

    Attributes:
        gradient: float32.
        parameter: own parameters, to be updated; values undefined if they are copies of float32 masters.
        states: stored states by name.
    """

    piece: ShardPiece
    gradient: Tensor
    parameter: Tensor
    states: Mapping[str, Tensor]

    @property
    def master(self) -> Tensor:
        """Return the tensor that the rule updates: float32 masters, or the parameters."""
        return self.states.get("master", self.parameter)

    @property
    def low(self) -> Tensor | None:
        """Return the parameters that receive rounded copies of float32 masters; None without such masters."""
        return self.parameter if "master" in self.states else None


class UpdateScalars(NamedTuple):
    """Hold copies of an update's scalars from the device, as :meth:`npuzero.ops.AdamLine.update` takes them."""

    scale: Tensor
    skip: Tensor | None
    dynamic: Tensor | None


#: Updates pieces of one chunk, all staged.
Launch = Callable[[Sequence[StagedChunk], UpdateScalars], None]


@dataclass
class _UpdateJob:
    """Run one update on the lane. Chunks and their gradients are added before a turn is queued.

    It has no reference to its OffloadedUpdate, which may be deleted first.
    """

    chunks: Sequence[UpdateChunk]
    banks: Sequence[StateStore]
    staging: Sequence[BufferRing]  # of gradients, of parameters
    mover: HostCopier
    on_device: bool
    lag: bool
    numbers: UpdateScalars
    skip: Tensor | None  # of the numbers, on the host
    taken: Sequence[AsyncHandle]  # copies of the numbers
    launch: Launch
    rank: int
    threads: int
    gradients: dict[FlatParameter, Tensor] = field(default_factory=dict)  # of the flats to update
    ready: PriorityQueue[int] = field(default_factory=PriorityQueue)  # chunks without a turn yet
    order: list[int] = field(default_factory=list)  # chunks by turn, so far
    updated: set[int] = field(default_factory=set)  # chunks
    ended: int = 0  # turns
    closed: bool = False  # all chunks are queued
    failed: BaseException | None = None
    # By turn: copies to the host in flight, and stores back.
    begun: dict[int, tuple[list[StagedChunk], list[AsyncHandle]]] = field(default_factory=dict)
    storing: dict[int, list[AsyncHandle]] = field(default_factory=dict)
    read: dict[int, list[StateStore]] = field(default_factory=dict)  # stores read in the first turns, one per ring slot

    def run(self, turn: int) -> None:
        """Update the next chunk. The lane runs turns in order."""
        if self.failed is not None:
            raise self.failed
        observe.set_rank(self.rank)
        try:
            self.mover.attend()
            if torch.get_num_threads() != self.threads:
                torch.set_num_threads(self.threads)  # a setting of this thread, which kernels obey
            self._run(turn)
        except BaseException as error:
            self._fail(error)
        self.ended = turn + 1

    @property
    def _in_place(self) -> bool:
        """Return whether gradients and parameters are updated in place, without staging."""
        return self.on_device or self.lag

    def finish(self) -> None:
        """Wait for all stores, then prefetch the first chunks of the next update."""
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
            bank.settle()  # inside the job, so that a failure here stops later steps
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
        # Store states right after the launch; the device copies are waited for last, so that both run at once.
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
        """Choose the chunk of a turn, and start to copy its updated pieces to the host."""
        # The ring slot of this turn was last used RING_SLOTS turns ago; its store must be done before it is filled.
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
        """Start to copy gradients and parameters of a chunk to the host."""
        # Parameters under float32 masters are not copied: the update overwrites them. They only need the slot.
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
        """Return the stores in flight of an updated chunk; any thread may call this and wait."""
        return self.storing.get(self.order.index(k), ()) if k in self.updated else ()


def _own_parameters(piece: ShardPiece) -> Tensor:
    """Return own parameters of a piece; an empty tensor if they are on a disk, since they come with the states."""
    if piece.flat.rests.parameters.memory is Memory.NVME:
        return torch.empty(0, dtype=piece.flat.dtype)
    return piece.flat.own_parameters[piece.begin : piece.end]


def _parameters_offloaded(piece: ShardPiece) -> bool:
    """Return whether the parameters are placed off the device, so that the update needs no copy to it."""
    return piece.flat.rests.parameters.far


def _add_stored_states(staged: StagedChunk, found: Sequence[Views]) -> StagedChunk:
    """Return a piece with its states, and with parameters if a store has them (on a disk, or for delayed updates)."""
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
    """Return the error for a use of the model between an update begun in backward and the step that ends it."""
    return StateError(
        "an update that has begun inside backward (early=True)",
        expected="step() of its optimizer next: a part of the model is updated, the rest is not",
        got="another forward or backward pass, a read or write of parameters or states, or zero_grad()",
        do="If the step has more micro-batches, run all but its last backward within npuzero.no_sync(model), or say "
        "how many backward passes a step has: early=4. If backward has raised, start again from the last checkpoint.",
    )


class OffloadedUpdate:
    """Run the offloaded part of a model's updates, one at a time.

    Args:
        units: in forward order.
        chunks: the offloaded shards of the model's flats; the division is fixed.
        overlap: False: each update ends within its step.
        on_device: kernels of the device update, and access host memory in place.
        lag: no reader waits for updated parameters; the next step copies them to the device.
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
        self._of: dict[int, list[int]] = {index: [] for index in self._unit_of.values()}  # chunks of each unit
        for k, chunk in enumerate(chunks):
            for index in {self._unit_of[piece.flat] for piece in chunk.pieces}:
                self._of[index].append(k)
        self._filed = {unit.index for unit in units if unit.plan.parameters.memory is Memory.NVME}
        self._job: _UpdateJob | None = None  # until its end has been waited for
        self._queued: set[int] = set()  # chunks
        self._turns: list[AsyncHandle] = []  # of all turns, then of finish()
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
        """Start to update the offloaded shards of ``flats``; continue an update that :meth:`open` began.

        Args:
            banks: stores of their states.
            launch: updates the staged pieces of one chunk; called on the lane.
            scale, skip, dynamic: on the device; copied, so they may change during the update.
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
        """Prepare an update. :meth:`add` adds flats one by one, :meth:`run` the rest. No other may be in flight."""
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
        """Add a flat with a complete gradient; a chunk is queued once all of its flats are added."""
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
        """Allocate the staging rings at the first update."""
        if self._staging or not self.chunks or self._on_device or self._lag:
            return
        # Slots fit the largest chunk. Pieces that are already on the host need none.
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
        """Return whether there is an update not yet waited for to its end."""
        return self._job is not None

    @property
    def waits(self) -> bool:
        """Return whether an update that began inside backward still needs its step."""
        return self._job is not None and not self._job.closed

    def has(self, unit: Unit) -> bool:
        """Return whether readers of ``unit`` may have to wait for an update."""
        return self.busy and not self._lag and unit.index in self._of

    def done(self, unit: Unit) -> bool:
        """Return whether :meth:`wait` would return at once."""
        return all(handle.done() for handle in self._updates(unit))

    def wait(self, unit: Unit) -> None:
        """Wait until the parameters of ``unit`` are updated, or raise the error of the update."""
        for handle in self._updates(unit):
            handle.wait()

    def _updates(self, unit: Unit) -> Iterator[AsyncHandle]:
        """Yield the handles to wait for, one by one, until the parameters of ``unit`` are updated."""
        job, turns = self._job, self._turns
        if job is None or not self.has(unit):
            return
        for k in self._of[unit.index]:
            if k not in self._queued:
                continue
            # The turn of a chunk is unknown until the lane chooses it; in a skipped step no chunk gets one.
            for turn in range(job.ended, len(turns)):
                if k not in job.updated:
                    yield turns[turn]
            if unit.index in self._filed:  # R1 reads the parameters from the disk
                yield from job.landing(k)

    def quiet(self) -> None:
        """Wait until the update is done and all states are stored; raise if it failed or still needs its step."""
        if self._job is not None:
            self.check()
            if self.waits:
                raise _unfinished_update_error()
            with observe.span("wait for update", ""):
                self._turns[-1].wait()
            self._job = None
            self._queued, self._turns = set(), []

    def check(self) -> None:
        """Raise the error of the update, if it failed."""
        if self._job is not None and self._job.failed is not None:
            raise self._job.failed

    def moved(self) -> Counter[str]:
        """Return the bytes moved by the last update, by link. Waits for the update to end."""
        self.quiet()
        return self.mover.moved
