"""R2 and R3 in a schedule: what one rank's backward launches, and how each launch moves the earlier ones on."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

from npuzero.plan.flats import Kind
from npuzero.plan.moves import Buffer, Collective, Copy, Give, Launch, Move, Purpose, Repeat, Start, Take, Wait, written
from npuzero.plan.report import TO_DEVICE, TO_HOST
from npuzero.plan.units import Unit

# So many launches of equal flats, and every reduction under way is one of theirs: R2, and up to three of R3, each of
# which a launch moves one on. From here on each launch does what the one before it did.
_SETTLED = 5


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
                comes, *stages = _stages(kind, root.index, True, None)[kind.scattered :]
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
