"""The moves of one steady step on one rank: the engine's order, without an engine.

The engine applies the four rules as torch's hooks come; what it then does, in which order and with which buffers,
follows from the plan, the flats, the mesh and a few settings. This module writes that down as data. The prediction sums
it (``predict.py``), a test compares the engine's own events with it, and a planner may time it.

What is assumed: units run one after another in forward, each once, and backward in reverse; a unit that spans others,
as the root does, begins before them and ends after them, and so do its gradients; every parameter that trains gets a
gradient; the step before had as many micro-batches, so that the last one is foreseen.

A model may have 100,000 flats, of few kinds: equal neighbours are one run, and moves carry a count.
"""

from __future__ import annotations

import enum
import itertools
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch

from npuzero.plan.filed import Filed
from npuzero.plan.flats import FlatSize, Held, Kind
from npuzero.plan.mesh import MeshShape
from npuzero.plan.moves import (
    Buffer,
    Collective,
    Compute,
    Copy,
    Give,
    Launch,
    Move,
    Purpose,
    Repeat,
    Start,
    Take,
    Wait,
)
from npuzero.plan.placement import ENDS, PIPE, STAGE, Axes, axes_over
from npuzero.plan.presets import Plan
from npuzero.plan.report import FROM_DISK, TO_DEVICE, TO_HOST
from npuzero.plan.stream import far_update

#: Numbers that each step's vote carries beside those of the parameters, a bit each, so that ranks find out where they
#: follow different rules.
DIGEST_BITS = 32

# So many launches of equal flats, and every reduction under way is one of theirs: R2, and up to three of R3, each of
# which a launch moves one on. From here on each launch does what the one before it did.
_SETTLED = 5


@dataclass(frozen=True)
class Step:
    """Describe how a step is run.

    Attributes:
        trainable_parameters: number of trainable parameter tensors: the vote carries a float for each.
        tied_parameters: how many of them the first and the last stage of a pipeline have in common.
        micro_batches: forward and backward passes, none of them under ``no_sync``.
        prefetch: units gathered ahead, where parameters overlap.
        overlaps_gradients: whether reductions run beside backward.
        overlaps_parameters: whether gathers run beside compute.
        clip: whether the gradient norm is taken.
        moments: state tensors per parameter beside the master (Adam: 2, with amsgrad 3).
        chunk_bytes: of masters and moments that are updated at a time, where they are far; 0: as many as is usual.
        on_device: whether the device updates what is far, reading it where it rests.
        spans: for each unit the index of the last one that runs inside of it, or its own; (): the root spans all
            others, and none of these any.
    """

    trainable_parameters: int
    micro_batches: int = 1
    prefetch: int = 1
    overlaps_gradients: bool = True
    overlaps_parameters: bool = True
    clip: bool = False
    moments: int = 2
    chunk_bytes: int = 0
    on_device: bool = False
    spans: tuple[int, ...] = ()
    tied_parameters: int = 0


@dataclass(frozen=True)
class _Stage:
    """Hold one collective of a reduction, as moves: what begins it, and what is done when the reduction moves on."""

    unit: int
    begins: tuple[Move, ...]
    ends: tuple[Move, ...]


def _stage(collective: Collective, made: Buffer | None, sent: Buffer | None) -> _Stage:
    """Make a stage; ``made``: a communication buffer lent for it; ``sent``: that which it sends, given back then."""
    takes = () if made is None else (Take(made),)
    gives = () if sent is None else (Give(sent),)
    wait = Wait(collective.purpose, collective.unit)
    return _Stage(collective.unit, (*takes, Start(collective)), (wait, *gives))


def _stages(kind: Kind, unit: int, boundary: bool, wire: Buffer | None) -> list[_Stage]:
    """Return the collectives of one reduction in order; ``wire``: what this pass brings, if it is not accumulated."""
    plan, stages = kind.plan, []
    if kind.scattered:
        reduce = kind.collective(Purpose.REDUCE, unit, "reduce_scatter", plan.gradients.axes, kind.numel, kind.wire)
        stages.append(_stage(reduce, None, wire))
        wire = None
    if boundary and kind.many(plan.deeper):
        numel = kind.shard(plan.gradients)
        deeper = kind.collective(Purpose.BOUNDARY, unit, "reduce_scatter", plan.deeper, numel, kind.wire)
        made = kind.as_wire(numel) if wire is None else None
        stages.append(_stage(deeper, made, wire or made))
        wire = None
    if boundary and kind.many(plan.beyond):
        numel, sums = kind.shard(plan.states), plan.precision.sums_of(kind.dtype)
        # Where sums are wider than the communication dtype they are scattered in that, and gathered as sums.
        verb = "all_reduce" if sums == kind.wire else "reduce_scatter"
        beyond = kind.collective(Purpose.BOUNDARY, unit, verb, plan.beyond, numel, kind.wire)
        made = kind.as_wire(numel) if wire is None else None
        stages.append(_stage(beyond, made, wire or made))
        if sums != kind.wire:
            gathered = kind.collective(Purpose.BOUNDARY, unit, "all_gather", plan.beyond, numel, sums)
            stages.append(_stage(gathered, None, None))
    return stages


def _waits(kind: Kind) -> bool:
    """Return whether R3 is left to the step, so that neither end of a pipeline holds up the other's passes."""
    return kind.plan.tied and kind.mesh.pipe > 1


def _from_home(kind: Kind, again: bool) -> tuple[Move, ...]:
    """Return what is done before more is added to gradients that have a home; ``again``: something is there."""
    copy = (Copy(TO_DEVICE, kind.gradient.nbytes),) if again else ()
    return (Take(kind.gradient), *copy) if kind.homed else ()


def _to_home(kind: Kind) -> tuple[Move, ...]:
    """Return what is done once it is added."""
    return (Copy(TO_HOST, kind.gradient.nbytes), Give(kind.gradient)) if kind.homed else ()


class _State(enum.Enum):
    """Name who holds a unit's parameters, as in the engine."""

    SHARDED, GATHERING, WHOLE, HELD = range(4)


class _Unit:
    """Follow a unit: its flats as runs of equal neighbours, and where its parameters are at this point of the
    schedule.
    """

    def __init__(self, index: int, runs: list[tuple[Kind, int]]) -> None:
        self.index = index
        self.runs = runs
        self.trainable = [(kind, count) for kind, count in runs if kind.trainable]
        self.has_frozen = len(self.trainable) < len(runs)
        self.apart = any(kind.apart for kind, _ in runs)
        self.state = _State.SHARDED if self.apart else _State.WHOLE
        # By run, what is held of it at each moment; and now, though it may be unsharded beside.
        self.after_forward = [kind.after_forward for kind, _ in runs]
        self.between = [kind.between for kind, _ in runs]
        self.rests = [kind.rests for kind, _ in runs]
        self.held = self.rests
        self.missing = False  # the present backward has still to bring gradients
        self.gathers = self.restores = 0  # collectives under way
        self.far = any(kind.far for kind, _ in self.trainable)


def _units(flats: Sequence[FlatSize], plan: Plan, mesh: MeshShape) -> list[_Unit]:
    """Return the units of flats that stand in order, the root first; one that has no flats is there, too."""
    runs: list[list[tuple[Kind, int]]] = [[] for _ in range(max((flat.unit for flat in flats), default=-1) + 1)]
    # What a kind has worked out is worked out once; by the plan's identity, since its value takes long to compare.
    kinds: dict[tuple[object, ...], Kind] = {}
    for flat, equal in itertools.groupby(flats):
        own = flat.plan or plan
        key = flat.numel, flat.dtype, flat.trainable, id(own)
        if key not in kinds:
            kinds[key] = Kind(flat.numel, flat.dtype, flat.trainable, own, mesh)
        runs[flat.unit].append((kinds[key], sum(1 for _ in equal)))
    return [_Unit(index, each) for index, each in enumerate(runs)]


def steady_step(flats: Sequence[FlatSize], plan: Plan, mesh: MeshShape, step: Step) -> list[Move]:
    """Return the moves of one rank in a steady step, from its first forward to ``zero_grad()``."""
    return _Rank(_units(flats, plan, mesh), mesh, plan, step).moves()


def _walk(units: Iterable[_Unit], spans: Sequence[int]) -> Iterator[tuple[_Unit, bool]]:
    """Yield each unit as it begins (True), and as it ends: when those inside of it have, which follow it."""
    within: list[_Unit] = []
    for unit in units:
        while within and not within[-1].index < unit.index <= spans[within[-1].index]:
            yield within.pop(), False
        within.append(unit)
        yield unit, True
    while within:
        yield within.pop(), False


class _Rank:
    """Write down what one rank does."""

    def __init__(self, units: list[_Unit], mesh: MeshShape, plan: Plan, step: Step) -> None:
        self._units = units
        self._mesh = mesh
        self._plan = plan
        self._step = step
        self._prefetch = step.prefetch if step.overlaps_parameters else 0
        self._moves: list[Move] = []
        # In the order in which forward begins them, and ends; only what is sharded is gathered ahead.
        self._trace = [unit for unit in units if unit.apart]
        self._spans = step.spans or (len(units) - 1, *range(1, len(units)))
        self._by_end = [unit for unit, begins in _walk(units, self._spans) if not begins]
        self._ended = [unit for unit in self._by_end if unit.apart]
        self._under_way: list[list[_Stage]] = []
        # Units whose update runs beside the next forward, and those behind them: R4 starts where it is awaited.
        late = step.overlaps_parameters and not plan.lag and any(unit.far for unit in units)
        first = next((i for i, unit in enumerate(units) if unit.far), 0)
        self._late = units[first:] if late else []
        self._owed: deque[_Unit] = deque()
        self._filed = Filed([unit.runs for unit in units], step.chunk_bytes)

    def moves(self) -> list[Move]:
        """Return the whole step."""
        if not self._units:
            return []
        passes = self._step.micro_batches
        self._moves += [Take(*ring) for ring in self._filed.rings]
        if self._step.overlaps_parameters:  # the last step's R4 is under way
            self._owed.extend(self._late)
            for unit in self._units[: len(self._units) - len(self._late)]:
                unit.restores = sum(count for kind, count in unit.trainable if kind.many(kind.plan.restored))
        if passes > 1:
            self._pass(first=True, last=False)
        if passes > 2:  # all alike: the first finds no gradients, the last sends them where the step wants them
            self._moves.append(Repeat(passes - 2, self._written(lambda: self._pass(first=False, last=False))))
        self._pass(first=passes == 1, last=True)
        for unit in self._units:  # the update begins: nothing that it makes stale stays
            self._release(unit, unit.rests)
        self._finish_gradients()
        runs = [run for unit in self._units for run in unit.trainable]
        self._moves += far_update(runs, self._step.chunk_bytes, self._step.moments, self._step.on_device)
        for unit in self._units[: len(self._units) - len(self._late)]:
            self._restore(unit)
        self._moves += [Give(*ring) for ring in self._filed.rings]
        for unit in self._units:  # zero_grad(), where they are large
            self._moves += [Give(kind.gradient, count) for kind, count in unit.trainable if not kind.homed]
        return self._moves

    def _written(self, do: Callable[[], None]) -> tuple[Move, ...]:
        """Return the moves that ``do`` makes, instead of adding them."""
        before, self._moves = self._moves, []
        do()
        made, self._moves = self._moves, before
        return tuple(made)

    def _pass(self, first: bool, last: bool) -> None:
        """Forward and backward of one micro-batch."""
        for unit, begins in _walk(self._units, self._spans):
            if begins:
                self._forward_begins(unit)
                self._moves.append(Compute(unit.index, backward=False))
            else:
                self._release(unit, unit.after_forward)
        # Before backward reaches any of them: what is gathered ahead depends on which units are done.
        for unit in self._units:
            unit.missing = bool(unit.trainable)
        late: list[_Unit] = []
        for unit, begins in _walk(self._by_end[::-1], self._spans):
            if begins:
                self._backward_reaches(unit, first)
                # A unit with frozen parameters is left when its inputs have their gradients, and of those its producer,
                # the unit before, is told first.
                for each in late:
                    self._release(each, each.between)
                late = []
            else:
                self._reduce(unit, first, last)
                late.append(unit)
                if not unit.has_frozen:
                    for each in late:
                        self._release(each, each.between)
                    late = []
        for unit in late:
            self._release(unit, unit.between)

    # -- R1 and R4 -------------------------------------------------------------------------------------------------

    def _forward_begins(self, unit: _Unit) -> None:
        self._finish_restore(unit)
        if unit.apart:
            self._finish_gather(unit)
            at = self._trace.index(unit) + 1
            self._gather_ahead(self._trace[at : at + self._prefetch])

    def _backward_reaches(self, unit: _Unit, first: bool) -> None:
        if unit.apart:
            self._finish_gather(unit)
            before = self._ended[: self._ended.index(unit)]
            self._gather_ahead(before[::-1][: self._prefetch])
        self._moves.append(Compute(unit.index, backward=True))
        if any(stages[0].unit == unit.index for stages in self._under_way):
            self._drain()  # of the pass before: what is being summed cannot be added to
        if first:
            self._moves += [Take(kind.gradient, count) for kind, count in unit.trainable if not kind.homed]

    def _gather_ahead(self, units: Iterable[_Unit]) -> None:
        for unit in units:
            if not self._done(unit):
                self._finish_restore(unit)
                self._start_gather(unit)

    def _done(self, unit: _Unit) -> bool:
        backward = any(each.missing for each in self._units)
        return backward and bool(unit.trainable) and not unit.missing

    def _start_gather(self, unit: _Unit) -> None:
        if unit.state not in (_State.SHARDED, _State.HELD):
            return
        for (kind, count), held, filed in zip(unit.runs, unit.held, self._filed.read[unit.index], strict=True):
            if kind.apart and not held.all:
                self._moves.append(Take(kind.whole, count))
                if kind.plan.parameters.far and not held.more:
                    self._moves += [Copy(FROM_DISK, filed)] if filed else []
                    self._moves.append(Copy(TO_DEVICE, kind.shard(kind.plan.parameters) * kind.dtype.itemsize, count))
                if kind.many(held.axes):
                    gather = kind.collective(
                        Purpose.GATHER, unit.index, "all_gather", held.axes, kind.numel, kind.dtype
                    )
                    self._moves.append(Start(gather, count))
                    unit.gathers += count
        unit.state = _State.GATHERING

    def _finish_gather(self, unit: _Unit) -> None:
        if unit.state is not _State.WHOLE:
            self._start_gather(unit)
            self._moves.append(Wait(Purpose.GATHER, unit.index, unit.gathers))
            unit.gathers = 0
            unit.state = _State.WHOLE

    def _release(self, unit: _Unit, keep: list[Held]) -> None:
        """Hold ``keep`` of a unit, by run, and no more."""
        if not unit.apart or unit.state is _State.SHARDED:
            return
        if unit.state is _State.GATHERING:  # gathered ahead, and never used
            self._finish_gather(unit)
        for (kind, count), before, held in zip(unit.runs, unit.held, keep, strict=True):
            if before.copy != held.copy:
                self._moves += [Give(before.copy, count)] if before.copy else []
                self._moves += [Take(held.copy, count)] if held.copy else []
            whole = unit.state is _State.WHOLE or before.all
            if kind.apart and whole and not held.all:
                self._moves.append(Give(kind.whole, count))
        unit.held = keep
        unit.state = _State.HELD if any(held.more for held in keep) else _State.SHARDED

    def _restore(self, unit: _Unit) -> None:
        for kind, count in unit.trainable:
            axes = kind.plan.restored
            if kind.many(axes):
                numel = kind.shard(kind.plan.parameters)
                restore = kind.collective(Purpose.RESTORE, unit.index, "all_gather", axes, numel, kind.dtype)
                self._moves.append(Start(restore, count))
                unit.restores += count
        if not self._step.overlaps_parameters:
            self._finish_restore(unit)

    def _finish_restore(self, unit: _Unit) -> None:
        while self._owed and self._owed[0].index <= unit.index:
            self._restore(self._owed.popleft())
        if unit.restores:
            self._moves.append(Wait(Purpose.RESTORE, unit.index, unit.restores))
            unit.restores = 0

    # -- R2 and R3 -------------------------------------------------------------------------------------------------

    def _reduce(self, unit: _Unit, first: bool, last: bool) -> None:
        """Reduce what is reduced in this pass: backward has brought all gradients of ``unit``."""
        unit.missing = False
        known: dict[int, Callable[[], None]] = {}
        for kind, count in reversed(unit.trainable):
            boundary = last and kind.has_boundary and not _waits(kind)
            passes = boundary and kind.may_pass and self._step.micro_batches == 1
            wire = kind.lent(kind.numel) if kind.scattered or passes else None
            # From home, where more is added; and there again. It comes when it is added to, or where that is sent on,
            # when it is summed.
            comes, goes = _from_home(kind, again=not first), _to_home(kind)
            if wire is None and not boundary:
                if kind.homed:
                    self._moves.append(Repeat(count, (*comes, *goes)))
                continue  # it is added up
            if id(kind) not in known:
                launched = Launch(unit.index)
                filled = (*comes, launched) if wire is None else (Take(wire), launched)
                stages = _stages(kind, unit.index, boundary, wire)
                if wire is not None:
                    stages[0] = replace(stages[0], begins=(*comes, *stages[0].begins))
                stages[-1] = replace(stages[-1], ends=(*stages[-1].ends, *goes))
                known[id(kind)] = partial(self._launch, filled, stages)
            launch = known[id(kind)]
            again: tuple[Move, ...] = ()
            for _ in range(min(count, _SETTLED)):
                again = self._written(launch)
                self._moves += again
            if count > _SETTLED:
                self._moves.append(Repeat(count - _SETTLED, again))

    def _launch(self, launch: tuple[Move, ...], stages: list[_Stage]) -> None:
        """Begin the reduction; ``launch``: its buffer is filled before earlier ones move on, so there are two at a
        time.
        """
        self._moves += launch[:-1]
        self._advance()
        self._moves.append(launch[-1])
        self._enter(stages)
        if not self._step.overlaps_gradients:
            self._drain()

    def _advance(self) -> None:
        """End each reduction's present collective and start its next."""
        under_way, self._under_way = self._under_way, []
        for stage, *rest in under_way:
            self._moves += stage.ends
            self._enter(rest)

    def _enter(self, stages: list[_Stage]) -> None:
        if stages:
            self._moves += stages[0].begins
            self._under_way.append(stages)

    def _drain(self) -> None:
        while self._under_way:
            self._advance()

    def _finish_gradients(self) -> None:
        """Finish what backward left, the vote on which parameters took part, and the norm."""
        self._drain()
        for unit in (unit for unit, begins in _walk(self._by_end[::-1], self._spans) if not begins):
            alone = sum(count for kind, count in unit.trainable if not kind.scattered and not kind.has_boundary)
            self._moves += [Launch(unit.index)] * alone
        for kind, count in reversed(self._units[0].trainable):  # in the root unit, and in front of what others reduce
            if _waits(kind):
                comes, *stages = _stages(kind, 0, True, None)[kind.scattered :]
                begins = (*_from_home(kind, again=True), *comes.begins)
                stages = [replace(comes, begins=begins), *stages]
                stages[-1] = replace(stages[-1], ends=(*stages[-1].ends, *_to_home(kind)))
                for _ in range(count):
                    self._launch((Launch(0),), stages)
        self._drain()
        owners = dict.fromkeys(kind.plan.owners for unit in self._units for kind, _ in unit.trainable)
        if self._step.trainable_parameters:
            # Beside the parameters: whether a program dropped gradients, or wrote into parameters, and the digest.
            votes = self._step.trainable_parameters + 2 + DIGEST_BITS
            self._control(Purpose.VOTE, STAGE, 4 * votes)
        if self._step.tied_parameters:
            self._control(Purpose.VOTE, (ENDS,), 4 * self._step.tied_parameters)
        self._control(Purpose.VOTE, (PIPE,), 4 * (1 + DIGEST_BITS))
        if self._step.clip and (owners or self._mesh.pipe > 1):
            self._control(Purpose.NORM, axes_over(owners, self._mesh.pipe), 2 * torch.float64.itemsize)

    def _control(self, purpose: Purpose, axes: Axes, nbytes: int) -> None:
        if self._mesh.size(axes) > 1:
            said = Collective(purpose, 0, "all_reduce", axes, self._mesh.size(axes), nbytes)
            self._moves += [Start(said), Wait(purpose, 0)]
