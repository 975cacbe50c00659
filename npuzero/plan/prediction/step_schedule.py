"""Moves of one steady step on one rank, in the engine's order, as data.

The engine applies the four rules from torch's hooks; the order of its actions and its buffers follow from the plan, the
flat parameters, the mesh and a few settings. The prediction sums these moves (``predict.py``), a test compares the
engine's events with them, and a planner may time them.

Assumptions: units run one after another in forward, each once, and backward runs in reverse; a unit that contains
others, such as the root, begins before them and ends after them, and so do its gradients; every trainable parameter
gets a gradient; the step before had as many micro-batches, so the engine knows which one is last.

A model may have 100,000 flat parameters of few kinds: equal neighbours are one run, and moves have a count.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import torch

from npuzero.plan.prediction.gradient_reductions import ReductionWriter
from npuzero.plan.prediction.offloaded_update import offloaded_update_moves
from npuzero.plan.prediction.report import FROM_DISK, TO_DEVICE
from npuzero.plan.presets import Plan
from npuzero.plan.sizes.flat_sizes import FlatSize, HeldParameters
from npuzero.plan.sizes.nvme_layout import NvmeLayout
from npuzero.plan.sizes.unit_states import PlannedUnit, PlannedUnitState, UnitPart, build_planned_units, walk_units
from npuzero.plan.table.mesh_shape import MeshShape
from npuzero.plan.table.placement import ENDS, PIPE, STAGE, Axes, axes_over
from npuzero.plan.table.step_moves import (
    AllocateBuffer,
    CollectivePurpose,
    ComputePass,
    CopyBytes,
    FreeBuffer,
    LaunchReduction,
    Move,
    PlannedCollective,
    RepeatMoves,
    StartCollective,
    WaitCollective,
    record_moves,
)

#: Numbers in each step's vote in addition to one per parameter, one bit each: ranks detect if they follow different
#: rules.
DIGEST_BITS = 32


@dataclass(frozen=True)
class StepSpec:
    """Describe how a step runs.

    Attributes:
        trainable_parameters: number of trainable parameter tensors; the vote has a float for each.
        tied_parameters: how many of them the first and the last stage of a pipeline share.
        micro_batches: forward and backward passes, none of them under ``no_sync``.
        prefetch: units gathered ahead, if parameters overlap.
        overlaps_gradients: whether reductions overlap backward.
        overlaps_parameters: whether gathers overlap compute.
        clip: whether the gradient norm is computed.
        moments: optimizer state tensors per parameter in addition to the master (Adam: 2, with amsgrad 3).
        chunk_bytes: bytes of masters and moments per chunk of an offloaded update; 0: the default.
        on_device: whether the device updates offloaded states, reading them in host memory.
        spans: for each unit the index of the last unit nested in it, or its own index; (): all others are nested in
            the root, and none in another unit.
        parts: of a divided model, such as pipeline stages: the indices of each part's units, including the root; ():
            one part.
        acts: the passes of the parts in order: index of the part, and whether it is a backward pass; passes of one part
            in the order of their micro-batches. (): ``micro_batches`` of the full model, one after another.
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
    parts: tuple[tuple[int, ...], ...] = ()
    acts: tuple[tuple[int, bool], ...] = ()
    tied_parameters: int = 0


def steady_step(flats: Sequence[FlatSize], plan: Plan, mesh: MeshShape, step: StepSpec) -> list[Move]:
    """Return the moves of one rank in a steady step, from its first forward to ``zero_grad()``."""
    return _StepWriter(build_planned_units(flats, plan, mesh), mesh, plan, step).moves()


class _StepWriter:
    """Write the moves of one rank."""

    def __init__(self, units: list[PlannedUnit], mesh: MeshShape, plan: Plan, step: StepSpec) -> None:
        self._units = units
        self._mesh = mesh
        self._plan = plan
        self._step = step
        self._prefetch = step.prefetch if step.overlaps_parameters else 0
        self._moves: list[Move] = []
        self._spans = step.spans or (len(units) - 1, *range(1, len(units)))
        self._whole = UnitPart(units, self._spans)
        self._parts = [UnitPart([units[i] for i in each], self._spans) for each in step.parts] or [self._whole]
        self._reductions = ReductionWriter(self._moves, step.overlaps_gradients)
        # Offloaded units whose update overlaps the next forward, and all units after them: R4 starts when
        # the next forward waits for it.
        late = step.overlaps_parameters and not plan.lag and any(unit.far for unit in units)
        first = next((i for i, unit in enumerate(units) if unit.far), 0)
        self._late = units[first:] if late else []
        self._owed: deque[PlannedUnit] = deque()
        self._filed = NvmeLayout([unit.runs for unit in units], step.chunk_bytes)

    def moves(self) -> list[Move]:
        """Return all moves of the step."""
        if not self._units:
            return []
        self._moves += [AllocateBuffer(*ring) for ring in self._filed.rings]
        if self._step.overlaps_parameters:  # R4 of the last step is in flight
            self._owed.extend(self._late)
            for unit in self._units[: len(self._units) - len(self._late)]:
                unit.restores = sum(count for kind, count in unit.trainable if kind.many(kind.plan.restored))
        self._acts(self._step.acts) if self._step.acts else self._micro_batches(self._step.micro_batches)
        for unit in self._units:  # the update makes copies stale: release them
            self._release(unit, unit.rests)
        self._finish_gradients()
        runs = [run for unit in self._units for run in unit.trainable]
        self._moves += offloaded_update_moves(runs, self._step.chunk_bytes, self._step.moments, self._step.on_device)
        for unit in self._units[: len(self._units) - len(self._late)]:
            self._restore(unit)
        self._moves += [FreeBuffer(*ring) for ring in self._filed.rings]
        for unit in self._units:  # zero_grad() frees large gradients
            self._moves += [FreeBuffer(kind.gradient, count) for kind, count in unit.trainable if not kind.homed]
        return self._moves

    def _acts(self, acts: Sequence[tuple[int, bool]]) -> None:
        """Append forwards and backwards of parts, in the given order."""
        passes = Counter(unit.index for number, backward in acts if backward for unit in self._parts[number].units)
        for unit in self._units:
            unit.passes = passes[unit.index]
        for number, backward in acts:
            (self._backward if backward else self._forward)(self._parts[number])

    def _micro_batches(self, count: int) -> None:
        """Append the passes of the full model, ``count`` times."""
        for unit in self._units:
            unit.passes = count
        if count > 1:
            self._pass()
        if count > 2:  # equal passes; only the first starts without gradients, only the last may run R3
            self._moves.append(RepeatMoves(count - 2, record_moves(self._moves, self._pass)))
            for unit in self._units:
                unit.passed = count - 1
        self._pass()

    def _pass(self) -> None:
        """Append the forward and backward of one micro-batch."""
        self._forward(self._whole)
        self._backward(self._whole)

    def _forward(self, part: UnitPart) -> None:
        for unit, begins in walk_units(part.units, self._spans):
            if begins:
                self._forward_begins(unit, part)
                self._moves.append(ComputePass(unit.index, backward=False))
            else:
                self._release(unit, unit.after_forward)

    def _backward(self, part: UnitPart) -> None:
        # Mark all units first: prefetch depends on which units backward has finished.
        for unit in part.units:
            unit.missing = bool(unit.trainable)
        late: list[PlannedUnit] = []
        for unit, begins in walk_units(part.by_end[::-1], self._spans):
            if begins:
                self._backward_reaches(unit, part)
                # A unit with frozen parameters is released once its inputs have gradients. Autograd calls the hook of
                # their producer, the unit before, first: so the release comes after that unit has begun.
                for each in late:
                    self._release(each, each.between)
                late = []
            else:
                self._reductions.reduce(unit)
                late.append(unit)
                if not unit.has_frozen:
                    for each in late:
                        self._release(each, each.between)
                    late = []
        for unit in late:
            self._release(unit, unit.between)
        for unit in part.units:
            unit.passed += 1

    # -- R1 and R4 -------------------------------------------------------------------------------------------------

    def _forward_begins(self, unit: PlannedUnit, part: UnitPart) -> None:
        self._finish_restore(unit)
        if unit.apart:
            self._finish_gather(unit)
            at = part.trace.index(unit) + 1
            self._gather_ahead(part, part.trace[at : at + self._prefetch])

    def _backward_reaches(self, unit: PlannedUnit, part: UnitPart) -> None:
        if unit.apart:
            self._finish_gather(unit)
            before = part.ended[: part.ended.index(unit)]
            self._gather_ahead(part, before[::-1][: self._prefetch])
        self._moves.append(ComputePass(unit.index, backward=True))
        if self._reductions.has(unit):
            self._reductions.drain()  # of the pass before: a gradient in reduction cannot be added to
        if unit.first:
            self._moves += [AllocateBuffer(kind.gradient, count) for kind, count in unit.trainable if not kind.homed]

    def _gather_ahead(self, part: UnitPart, units: Iterable[PlannedUnit]) -> None:
        for unit in units:
            if not part.done(unit):
                self._finish_restore(unit)
                self._start_gather(unit)

    def _start_gather(self, unit: PlannedUnit) -> None:
        if unit.state not in (PlannedUnitState.SHARDED, PlannedUnitState.HELD):
            return
        for (kind, count), held, filed in zip(unit.runs, unit.held, self._filed.read[unit.index], strict=True):
            if kind.apart and not held.all:
                self._moves.append(AllocateBuffer(kind.whole, count))
                if kind.plan.parameters.far and not held.more:
                    self._moves += [CopyBytes(FROM_DISK, filed)] if filed else []
                    self._moves.append(
                        CopyBytes(TO_DEVICE, kind.shard(kind.plan.parameters) * kind.dtype.itemsize, count)
                    )
                if kind.many(held.axes):
                    gather = kind.collective(
                        CollectivePurpose.GATHER, unit.index, "all_gather", held.axes, kind.numel, kind.dtype
                    )
                    bits = kind.plan.precision.gather_bits
                    if bits and not held.more:  # stored shards are sent quantized, copies of them are not
                        codes = kind.codes("gather", held.axes, kind.numel, bits)
                        gather = replace(gather, nbytes=codes.nbytes)
                        self._moves.append(AllocateBuffer(codes, count))
                        unit.codes.append(FreeBuffer(codes, count))
                    self._moves.append(StartCollective(gather, count))
                    unit.gathers += count
        unit.state = PlannedUnitState.GATHERING

    def _finish_gather(self, unit: PlannedUnit) -> None:
        if unit.state is not PlannedUnitState.WHOLE:
            self._start_gather(unit)
            self._moves += [WaitCollective(CollectivePurpose.GATHER, unit.index, unit.gathers), *unit.codes]
            unit.gathers, unit.codes = 0, []
            unit.state = PlannedUnitState.WHOLE

    def _release(self, unit: PlannedUnit, keep: list[HeldParameters]) -> None:
        """Keep only ``keep`` of a unit's parameters, one entry per run."""
        if not unit.apart or unit.state is PlannedUnitState.SHARDED:
            return
        if unit.state is PlannedUnitState.GATHERING:  # prefetched, never used
            self._finish_gather(unit)
        for (kind, count), before, held in zip(unit.runs, unit.held, keep, strict=True):
            if before.copy != held.copy:
                self._moves += [FreeBuffer(before.copy, count)] if before.copy else []
                self._moves += [AllocateBuffer(held.copy, count)] if held.copy else []
            whole = unit.state is PlannedUnitState.WHOLE or before.all
            if kind.apart and whole and not held.all:
                self._moves.append(FreeBuffer(kind.whole, count))
        unit.held = keep
        unit.state = PlannedUnitState.HELD if any(held.more for held in keep) else PlannedUnitState.SHARDED

    def _restore(self, unit: PlannedUnit) -> None:
        for kind, count in unit.trainable:
            axes = kind.plan.restored
            if kind.many(axes):
                numel = kind.shard(kind.plan.parameters)
                restore = kind.collective(CollectivePurpose.RESTORE, unit.index, "all_gather", axes, numel, kind.dtype)
                self._moves.append(StartCollective(restore, count))
                unit.restores += count
        if not self._step.overlaps_parameters:
            self._finish_restore(unit)

    def _finish_restore(self, unit: PlannedUnit) -> None:
        # Late units start R4 in forward order, so that all ranks start these collectives in the same order.
        while self._owed and self._owed[0].index <= unit.index:
            self._restore(self._owed.popleft())
        if unit.restores:
            self._moves.append(WaitCollective(CollectivePurpose.RESTORE, unit.index, unit.restores))
            unit.restores = 0

    def _finish_gradients(self) -> None:
        """Finish the remaining reductions, the vote on which parameters got gradients, and the norm."""
        self._reductions.drain()
        for unit in (unit for unit, begins in walk_units(self._whole.by_end[::-1], self._spans) if not begins):
            alone = sum(count for kind, count in unit.trainable if not kind.scattered and not kind.has_boundary)
            self._moves += [LaunchReduction(unit.index)] * alone
        self._reductions.reduce_tied(self._units[0])
        owners = dict.fromkeys(kind.plan.owners for unit in self._units for kind, _ in unit.trainable)
        if self._step.trainable_parameters:
            # Votes in addition to the parameters: whether a program dropped gradients or wrote into parameters, whether
            # data ranks have the same batch, and the digest.
            votes = self._step.trainable_parameters + 3 + DIGEST_BITS
            self._control(CollectivePurpose.VOTE, STAGE, 4 * votes)
        if self._step.tied_parameters:
            self._control(CollectivePurpose.VOTE, (ENDS,), 4 * self._step.tied_parameters)
        self._control(CollectivePurpose.VOTE, (PIPE,), 4 * (1 + DIGEST_BITS))
        if self._step.clip and (owners or self._mesh.pipe > 1):
            self._control(CollectivePurpose.NORM, axes_over(owners, self._mesh.pipe), 2 * torch.float64.itemsize)

    def _control(self, purpose: CollectivePurpose, axes: Axes, nbytes: int) -> None:
        if self._mesh.size(axes) > 1:
            said = PlannedCollective(purpose, 0, "all_reduce", axes, self._mesh.size(axes), nbytes)
            self._moves += [StartCollective(said), WaitCollective(purpose, 0)]
