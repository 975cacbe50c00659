"""R2 and R3 in a schedule: the reductions that backward launches, and how each launch advances the earlier ones."""

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

# After this many launches of equal flat parameters every reduction in flight is one of theirs: each axis takes one or
# two collectives, and each launch advances a reduction by one collective. From then on all launches add the same moves.
_SETTLED = 12


@dataclass(frozen=True)
class _ReductionStage:
    """Hold one collective of a reduction: the moves that start it, and the moves when the reduction advances."""

    unit: int
    begins: tuple[Move, ...]
    ends: tuple[Move, ...]


def _make_reduction_stage(
    collective: PlannedCollective, begins: Iterable[Move], ends: Iterable[Move]
) -> _ReductionStage:
    """Make a stage from the moves before its collective starts and after it has finished."""
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
        sent: pooled buffer with the values; None: they are float32, and stay where they are.
        sums: pooled buffer for the result.
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
    """Yield the collectives of a reduce-scatter of ``numel`` elements, level by level.

    Each level writes its sums to a pooled buffer for the next; the last level adds them to the accumulator.
    ``sent``: as in :func:`_make_plain_stage`.
    """
    for i, level in enumerate(levels):
        ranks = kind.mesh.size(level.axes)
        sums = kind.lent(numel // ranks, torch.float32) if i < len(levels) - 1 else None
        if level.bits is None:
            collective = kind.collective(purpose, unit, "reduce_scatter", level.axes, numel, kind.wire)
            yield _make_plain_stage(kind, collective, numel, sent, sums)
        else:
            # Values are freed once they are quantized, and received codes once they are added.
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
    # If sums are wider than the wire, or the wire is quantized: reduce-scatter on the wire, then all-gather the sums.
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
    """Return the collectives of one reduction in order; ``wire``: this pass's gradients, if not accumulated."""
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
    """Return whether R3 waits for the step, so that neither end of a pipeline delays the passes at the opposite end."""
    return kind.plan.tied and kind.mesh.pipe > 1


def _load_gradient_moves(kind: FlatKind, again: bool) -> tuple[Move, ...]:
    """Return the moves before gradients stored on the host are added to; ``again``: the host has earlier ones."""
    copy = (CopyBytes(TO_DEVICE, kind.gradient.nbytes),) if again else ()
    return (AllocateBuffer(kind.gradient), *copy) if kind.homed else ()


def _offload_gradient_moves(kind: FlatKind) -> tuple[Move, ...]:
    """Return the moves after gradients stored on the host are added to."""
    return (CopyBytes(TO_HOST, kind.gradient.nbytes), FreeBuffer(kind.gradient)) if kind.homed else ()


class ReductionWriter:
    """Write the moves of reductions in the order that backward launches them.

    Args:
        moves: list that the moves are appended to.
        overlapped: whether reductions overlap backward.
    """

    def __init__(self, moves: list[Move], overlapped: bool) -> None:
        self._moves = moves
        self._overlapped = overlapped
        self._under_way: list[list[_ReductionStage]] = []

    def has(self, unit: PlannedUnit) -> bool:
        """Tell whether a reduction of ``unit`` is in flight."""
        return any(stages[0].unit == unit.index for stages in self._under_way)

    def reduce(self, unit: PlannedUnit) -> None:
        """Reduce the gradients of ``unit``, which this backward pass has completed, as far as this pass requires."""
        unit.missing = False
        known: dict[int, Callable[[], None]] = {}
        for kind, count in reversed(unit.trainable):
            boundary = unit.last and kind.has_boundary and not _defers_boundary(kind)
            passes = boundary and kind.may_pass and unit.first
            wire = kind.lent(kind.numel) if kind.scattered or passes else None
            # Gradients stored on the host are loaded when this pass adds to them: at once, or, if they are sent first,
            # when the first collective sums them. They are offloaded again afterwards.
            comes, goes = _load_gradient_moves(kind, again=not unit.first), _offload_gradient_moves(kind)
            if wire is None and not boundary:
                if kind.homed:
                    self._moves.append(RepeatMoves(count, (*comes, *goes)))
                continue  # it is only accumulated
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
        """Reduce at the step the parameters that both ends of a pipeline share; they belong to the root."""
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
        """Begin a reduction. Its buffer is filled before earlier reductions advance, so two buffers exist at a time."""
        self._moves += launch[:-1]
        self._advance()
        self._moves.append(launch[-1])
        self._enter(stages)
        if not self._overlapped:
            self.drain()

    def _advance(self) -> None:
        """End the current collective of each reduction and start its next."""
        under_way, self._under_way = self._under_way, []
        for stage, *rest in under_way:
            self._moves += stage.ends
            self._enter(rest)

    def _enter(self, stages: list[_ReductionStage]) -> None:
        if stages:
            self._moves += stages[0].begins
            self._under_way.append(stages)

    def drain(self) -> None:
        """Finish every reduction in flight."""
        while self._under_way:
            self._advance()
