"""R2 and R3 in a schedule: what one rank's backward launches, and how each launch moves the earlier ones on."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch

from npuzero.plan.prediction.report import TO_DEVICE, TO_HOST
from npuzero.plan.sizes.flat_sizes import FlatKind
from npuzero.plan.sizes.unit_states import PlannedUnit
from npuzero.plan.table.step_moves import (
    AllocateBuffer,
    CollectivePurpose,
    CopyBytes,
    FreeBuffer,
    LaunchReduction,
    Move,
    PlannedCollective,
    RepeatMoves,
    StartCollective,
    StepBuffer,
    WaitCollective,
    record_moves,
)
from npuzero.plan.table.wire import WireLevel

# So many launches of equal flats, and every reduction under way is one of theirs: each axis is one collective of it, or
# two, and a launch moves it one on. From here on each launch does what the one before it did.
_SETTLED = 12


@dataclass(frozen=True)
class _ReductionStage:
    """Hold one collective of a reduction, as moves: what begins it, and what is done when the reduction moves on."""

    unit: int
    begins: tuple[Move, ...]
    ends: tuple[Move, ...]


def _make_reduction_stage(
    collective: PlannedCollective, begins: Iterable[Move], ends: Iterable[Move]
) -> _ReductionStage:
    """Make a stage of what is done before its collective starts, and once that is over."""
    wait = WaitCollective(collective.purpose, collective.unit)
    return _ReductionStage(collective.unit, (*begins, StartCollective(collective)), (wait, *ends))


def _free_moves(buffer: StepBuffer | None) -> tuple[Move, ...]:
    return () if buffer is None else (FreeBuffer(buffer),)


def _allocate_moves(buffer: StepBuffer | None) -> tuple[Move, ...]:
    return () if buffer is None else (AllocateBuffer(buffer),)


def _make_plain_stage(
    kind: FlatKind, collective: PlannedCollective, numel: int, sent: StepBuffer | None, sums: StepBuffer | None = None
) -> _ReductionStage:
    """Make the stage of a sum in the communication dtype.

    Args:
        sent: the buffer that the values are in, which is lent; None: they are float32, and stay where they are.
        sums: what is lent for the result.
    """
    if kind.wire in (torch.float32, sent and sent.dtype):
        return _make_reduction_stage(collective, _allocate_moves(sums), _free_moves(sent))
    rounded = kind.lent(numel)
    return _make_reduction_stage(
        collective, (AllocateBuffer(rounded), *_free_moves(sent), *_allocate_moves(sums)), (FreeBuffer(rounded),)
    )


def _iter_scatter_stages(
    kind: FlatKind,
    purpose: CollectivePurpose,
    unit: int,
    levels: Sequence[WireLevel],
    numel: int,
    sent: StepBuffer | None,
) -> Iterator[_ReductionStage]:
    """Yield the collectives of a reduce_scatter of ``numel`` elements, level by level; ``sent``: as in
    :func:`_make_plain_stage`.

    What a level has summed is lent to the next; the last one adds it to what is there.
    """
    for i, level in enumerate(levels):
        ranks = kind.mesh.size(level.axes)
        sums = kind.lent(numel // ranks, torch.float32) if i < len(levels) - 1 else None
        if level.bits is None:
            collective = kind.collective(purpose, unit, "reduce_scatter", level.axes, numel, kind.wire)
            yield _make_plain_stage(kind, collective, numel, sent, sums)
        else:
            # Values are free as soon as they are codes, and codes that came once they are added up.
            codes = kind.codes("reduce", level.axes, numel, level.bits)
            collective = PlannedCollective(purpose, unit, "all_to_all", level.axes, ranks, codes.nbytes)
            begins = (AllocateBuffer(codes), *_free_moves(sent), AllocateBuffer(codes))
            yield _make_reduction_stage(
                collective, begins, (FreeBuffer(codes), *_allocate_moves(sums), FreeBuffer(codes))
            )
        numel, sent = numel // ranks, sums


def _iter_replicated_stages(kind: FlatKind, unit: int, wire: StepBuffer | None) -> Iterator[_ReductionStage]:
    """Yield the collectives of R3's sum over the axes that replicate states."""
    numel, sums = kind.shard(kind.plan.states), kind.plan.precision.sums_of(kind.dtype)
    if sums == kind.wire and not any(level.bits for level in kind.levels.spread):
        reduce = kind.collective(CollectivePurpose.BOUNDARY, unit, "all_reduce", kind.plan.beyond, numel, kind.wire)
        yield _make_plain_stage(kind, reduce, numel, wire)
        return
    # Where sums are wider than the communication dtype, or that is thin, they are scattered in it and gathered as sums.
    yield from _iter_scatter_stages(kind, CollectivePurpose.BOUNDARY, unit, kind.levels.spread, numel, wire)
    rounded = None if sums == torch.float32 else kind.lent(numel)
    part = numel
    for level in kind.levels.spread:
        part //= kind.mesh.size(level.axes)
    for level in reversed(kind.levels.spread):
        part *= kind.mesh.size(level.axes)
        gather = kind.collective(CollectivePurpose.BOUNDARY, unit, "all_gather", level.axes, part, sums)
        first, last = level is kind.levels.spread[-1], level is kind.levels.spread[0]
        yield _make_reduction_stage(
            gather, _allocate_moves(rounded) if first else (), _free_moves(rounded) if last else ()
        )


def _list_reduction_stages(kind: FlatKind, unit: int, boundary: bool, wire: StepBuffer | None) -> list[_ReductionStage]:
    """Return the collectives of one reduction in order; ``wire``: what this pass brings, if it is not accumulated."""
    stages: list[_ReductionStage] = []
    if kind.scattered:
        stages += _iter_scatter_stages(kind, CollectivePurpose.REDUCE, unit, kind.levels.scatter, kind.numel, wire)
        wire = None
    if boundary and kind.levels.deepen:
        stages += _iter_scatter_stages(
            kind, CollectivePurpose.BOUNDARY, unit, kind.levels.deepen, kind.shard(kind.plan.gradients), wire
        )
        wire = None
    if boundary and kind.levels.spread:
        stages += _iter_replicated_stages(kind, unit, wire)
    return stages


def _defers_boundary(kind: FlatKind) -> bool:
    """Return whether R3 is left to the step, so that neither end of a pipeline holds up the other's passes."""
    return kind.plan.tied and kind.mesh.pipe > 1


def _load_gradient_moves(kind: FlatKind, again: bool) -> tuple[Move, ...]:
    """Return what is done before more is added to gradients that have a home; ``again``: something is there."""
    copy = (CopyBytes(TO_DEVICE, kind.gradient.nbytes),) if again else ()
    return (AllocateBuffer(kind.gradient), *copy) if kind.homed else ()


def _offload_gradient_moves(kind: FlatKind) -> tuple[Move, ...]:
    """Return what is done once it is added."""
    return (CopyBytes(TO_HOST, kind.gradient.nbytes), FreeBuffer(kind.gradient)) if kind.homed else ()


class ReductionWriter:
    """Write down reductions as backward launches them.

    Args:
        moves: where to.
        overlapped: whether they run beside backward.
    """

    def __init__(self, moves: list[Move], overlapped: bool) -> None:
        self._moves = moves
        self._overlapped = overlapped
        self._under_way: list[list[_ReductionStage]] = []

    def has(self, unit: PlannedUnit) -> bool:
        """Tell whether one of ``unit`` is under way."""
        return any(stages[0].unit == unit.index for stages in self._under_way)

    def reduce(self, unit: PlannedUnit) -> None:
        """Reduce what is reduced in this pass: backward has brought all gradients of ``unit``."""
        unit.missing = False
        known: dict[int, Callable[[], None]] = {}
        for kind, count in reversed(unit.trainable):
            boundary = unit.last and kind.has_boundary and not _defers_boundary(kind)
            passes = boundary and kind.may_pass and unit.first
            wire = kind.lent(kind.numel) if kind.scattered or passes else None
            # From home, where more is added; and there again. It comes when it is added to, or where that is sent on,
            # when it is summed.
            comes, goes = _load_gradient_moves(kind, again=not unit.first), _offload_gradient_moves(kind)
            if wire is None and not boundary:
                if kind.homed:
                    self._moves.append(RepeatMoves(count, (*comes, *goes)))
                continue  # it is added up
            if id(kind) not in known:
                launched = LaunchReduction(unit.index)
                filled = (*comes, launched) if wire is None else (AllocateBuffer(wire), launched)
                stages = _list_reduction_stages(kind, unit.index, boundary, wire)
                if wire is not None:
                    stages[0] = replace(stages[0], begins=(*comes, *stages[0].begins))
                stages[-1] = replace(stages[-1], ends=(*stages[-1].ends, *goes))
                known[id(kind)] = partial(self._launch, filled, stages)
            launch = known[id(kind)]
            again: tuple[Move, ...] = ()
            for _ in range(min(count, _SETTLED)):
                again = record_moves(self._moves, launch)
                self._moves += again
            if count > _SETTLED:
                self._moves.append(RepeatMoves(count - _SETTLED, again))

    def reduce_tied(self, root: PlannedUnit) -> None:
        """Reduce at the step what both ends of a pipeline have, which is the root's."""
        for kind, count in reversed(root.trainable):
            if _defers_boundary(kind):
                comes, *stages = _list_reduction_stages(kind, root.index, True, None)[len(kind.levels.scatter) :]
                begins = (*_load_gradient_moves(kind, again=True), *comes.begins)
                stages = [replace(comes, begins=begins), *stages]
                stages[-1] = replace(stages[-1], ends=(*stages[-1].ends, *_offload_gradient_moves(kind)))
                for _ in range(count):
                    self._launch((LaunchReduction(root.index),), stages)
        self.drain()

    def _launch(self, launch: tuple[Move, ...], stages: list[_ReductionStage]) -> None:
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

    def _enter(self, stages: list[_ReductionStage]) -> None:
        if stages:
            self._moves += stages[0].begins
            self._under_way.append(stages)

    def drain(self) -> None:
        """Finish every reduction under way."""
        while self._under_way:
            self._advance()
