"""R2 and R3 in a schedule: what one rank's backward launches, and how each launch moves the earlier ones on."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch

from npuzero.plan.flats import Kind
from npuzero.plan.moves import Buffer, Collective, Copy, Give, Launch, Move, Purpose, Repeat, Start, Take, Wait, written
from npuzero.plan.report import TO_DEVICE, TO_HOST
from npuzero.plan.units import Unit
from npuzero.plan.wire import Level

# So many launches of equal flats, and every reduction under way is one of theirs: each axis is one collective of it, or
# two, and a launch moves it one on. From here on each launch does what the one before it did.
_SETTLED = 12


@dataclass(frozen=True)
class _Stage:
    """Hold one collective of a reduction, as moves: what begins it, and what is done when the reduction moves on."""

    unit: int
    begins: tuple[Move, ...]
    ends: tuple[Move, ...]


def _stage(collective: Collective, begins: Iterable[Move], ends: Iterable[Move]) -> _Stage:
    """Make a stage of what is done before its collective starts, and once that is over."""
    wait = Wait(collective.purpose, collective.unit)
    return _Stage(collective.unit, (*begins, Start(collective)), (wait, *ends))


def _given(buffer: Buffer | None) -> tuple[Move, ...]:
    return () if buffer is None else (Give(buffer),)


def _taken(buffer: Buffer | None) -> tuple[Move, ...]:
    return () if buffer is None else (Take(buffer),)


def _plain(kind: Kind, collective: Collective, numel: int, sent: Buffer | None, sums: Buffer | None = None) -> _Stage:
    """Make the stage of a sum in the communication dtype.

    Args:
        sent: the buffer that the values are in, which is lent; None: they are float32, and stay where they are.
        sums: what is lent for the result.
    """
    if kind.wire in (torch.float32, sent and sent.dtype):
        return _stage(collective, _taken(sums), _given(sent))
    rounded = kind.lent(numel)
    return _stage(collective, (Take(rounded), *_given(sent), *_taken(sums)), (Give(rounded),))


def _scattered(
    kind: Kind, purpose: Purpose, unit: int, levels: Sequence[Level], numel: int, sent: Buffer | None
) -> Iterator[_Stage]:
    """Yield the collectives of a reduce_scatter of ``numel`` elements, level by level; ``sent``: as in :func:`_plain`.

    What a level has summed is lent to the next; the last one adds it to what is there.
    """
    for i, level in enumerate(levels):
        ranks = kind.mesh.size(level.axes)
        sums = kind.lent(numel // ranks, torch.float32) if i < len(levels) - 1 else None
        if level.bits is None:
            collective = kind.collective(purpose, unit, "reduce_scatter", level.axes, numel, kind.wire)
            yield _plain(kind, collective, numel, sent, sums)
        else:
            # Values are free as soon as they are codes, and codes that came once they are added up.
            codes = kind.codes("reduce", level.axes, numel, level.bits)
            collective = Collective(purpose, unit, "all_to_all", level.axes, ranks, codes.nbytes)
            begins = (Take(codes), *_given(sent), Take(codes))
            yield _stage(collective, begins, (Give(codes), *_taken(sums), Give(codes)))
        numel, sent = numel // ranks, sums


def _spread(kind: Kind, unit: int, wire: Buffer | None) -> Iterator[_Stage]:
    """Yield the collectives of R3's sum over the axes that replicate states."""
    numel, sums = kind.shard(kind.plan.states), kind.plan.precision.sums_of(kind.dtype)
    if sums == kind.wire and not any(level.bits for level in kind.levels.spread):
        reduce = kind.collective(Purpose.BOUNDARY, unit, "all_reduce", kind.plan.beyond, numel, kind.wire)
        yield _plain(kind, reduce, numel, wire)
        return
    # Where sums are wider than the communication dtype, or that is thin, they are scattered in it and gathered as sums.
    yield from _scattered(kind, Purpose.BOUNDARY, unit, kind.levels.spread, numel, wire)
    rounded = None if sums == torch.float32 else kind.lent(numel)
    part = numel
    for level in kind.levels.spread:
        part //= kind.mesh.size(level.axes)
    for level in reversed(kind.levels.spread):
        part *= kind.mesh.size(level.axes)
        gather = kind.collective(Purpose.BOUNDARY, unit, "all_gather", level.axes, part, sums)
        first, last = level is kind.levels.spread[-1], level is kind.levels.spread[0]
        yield _stage(gather, _taken(rounded) if first else (), _given(rounded) if last else ())


def _stages(kind: Kind, unit: int, boundary: bool, wire: Buffer | None) -> list[_Stage]:
    """Return the collectives of one reduction in order; ``wire``: what this pass brings, if it is not accumulated."""
    stages: list[_Stage] = []
    if kind.scattered:
        stages += _scattered(kind, Purpose.REDUCE, unit, kind.levels.scatter, kind.numel, wire)
        wire = None
    if boundary and kind.levels.deepen:
        stages += _scattered(kind, Purpose.BOUNDARY, unit, kind.levels.deepen, kind.shard(kind.plan.gradients), wire)
        wire = None
    if boundary and kind.levels.spread:
        stages += _spread(kind, unit, wire)
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


class Reductions:
    """Write down reductions as backward launches them.

    Args:
        moves: where to.
        overlapped: whether they run beside backward.
    """

    def __init__(self, moves: list[Move], overlapped: bool) -> None:
        self._moves = moves
        self._overlapped = overlapped
        self._under_way: list[list[_Stage]] = []

    def has(self, unit: Unit) -> bool:
        """Tell whether one of ``unit`` is under way."""
        return any(stages[0].unit == unit.index for stages in self._under_way)

    def reduce(self, unit: Unit) -> None:
        """Reduce what is reduced in this pass: backward has brought all gradients of ``unit``."""
        unit.missing = False
        known: dict[int, Callable[[], None]] = {}
        for kind, count in reversed(unit.trainable):
            boundary = unit.last and kind.has_boundary and not _waits(kind)
            passes = boundary and kind.may_pass and unit.first
            wire = kind.lent(kind.numel) if kind.scattered or passes else None
            # From home, where more is added; and there again. It comes when it is added to, or where that is sent on,
            # when it is summed.
            comes, goes = _from_home(kind, again=not unit.first), _to_home(kind)
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
                again = written(self._moves, launch)
                self._moves += again
            if count > _SETTLED:
                self._moves.append(Repeat(count - _SETTLED, again))

    def reduce_tied(self, root: Unit) -> None:
        """Reduce at the step what both ends of a pipeline have, which is the root's."""
        for kind, count in reversed(root.trainable):
            if _waits(kind):
                comes, *stages = _stages(kind, root.index, True, None)[len(kind.levels.scatter) :]
                begins = (*_from_home(kind, again=True), *comes.begins)
                stages = [replace(comes, begins=begins), *stages]
                stages[-1] = replace(stages[-1], ends=(*stages[-1].ends, *_to_home(kind)))
                for _ in range(count):
                    self._launch((Launch(root.index),), stages)
        self.drain()

    def _launch(self, launch: tuple[Move, ...], stages: list[_Stage]) -> None:
        """Begin the reduction; ``launch``: its buffer is filled before earlier ones move on, so there are two at a
        time.
        """
        self._moves += launch[:-1]
        self._advance()
        self._moves.append(launch[-1])
        self._enter(stages)
        if not self._overlapped:
            self.drain()

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

    def drain(self) -> None:
        """Finish every reduction under way."""
        while self._under_way:
            self._advance()
