"""The shard specs of one flat parameter: for each part its ranks, its memory and this rank's range.

A plan describes the training state of a model. A shard spec applies it to one flat, so flats of one engine may follow
different plans. Code that moves a part (``ParameterGatherer``, ``GradientReducer``, ``UpdatedParameterGatherer``) reads
only the flat's specs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from npuzero.comm import Communicator
from npuzero.plan import (
    Axes,
    Memory,
    Placement,
    Plan,
    WireLevel,
    device_shard_numel,
    levels_beyond,
    levels_of,
    residual_numels,
)
from npuzero.shard.layout.flat_layout import FlatLayout
from npuzero.shard.layout.traffic_meter import CountingMesh


class RankGroup:
    """Describe the ranks along some axes of the mesh, including this rank.

    Attributes:
        axes: outermost first.
        size: number of ranks.
        index: index of this rank in the group.
        many: whether ``size > 1``; if not, a collective over the group is the identity and is skipped.
    """

    def __init__(self, mesh: CountingMesh, axes: Axes) -> None:
        self.axes = axes
        self.size = mesh.size(axes)
        self.index = mesh.index(axes)
        self.many = self.size > 1
        self._mesh = mesh

    def communicator(self, purpose: str) -> Communicator:
        """Return the communicator of these ranks on the channel ``purpose``, created at the first call."""
        return self._mesh.communicator(self.axes, purpose)


@dataclass(frozen=True, eq=False)
class ShardSpec:
    """Describe the placement of one part of a flat.

    Attributes:
        group: the ranks it is sharded over; one shard per rank, in rank order.
        memory: the memory that stores it.
        begin, end: this rank's shard, in elements of the flat.
        near: number of leading elements of the shard that are on the device, independent of ``memory``.
        guarded: whether programs may not access it: it is sharded, or would be with more ranks (strict mode), or it is
            offloaded parameters.
    """

    group: RankGroup
    memory: Memory
    begin: int
    end: int
    near: int
    guarded: bool

    @staticmethod
    def of(placement: Placement, layout: FlatLayout, mesh: CountingMesh, strict: bool) -> ShardSpec:
        """Return the shard spec of a part with this placement, for a flat of this layout."""
        group = RankGroup(mesh, placement.axes)
        begin, end = layout.shard(group.index, group.size)
        guarded = group.many or (strict and bool(group.axes))
        return ShardSpec(group, placement.memory, begin, end, device_shard_numel(placement, end - begin), guarded)

    @property
    def range(self) -> tuple[int, int]:
        return self.begin, self.end

    @property
    def numel(self) -> int:
        return self.end - self.begin

    @property
    def cut(self) -> bool:
        """Return whether this rank has only a part of it."""
        return self.group.many

    @property
    def far(self) -> bool:
        """Return whether it is offloaded: stored off the device."""
        return self.memory is not Memory.DEVICE

    def within(self, outer: ShardSpec) -> slice:
        """Return this shard as a slice of ``outer``, which has fewer shards. The plan's law makes it contiguous."""
        return slice(self.begin - outer.begin, self.end - outer.begin)


@dataclass(frozen=True, eq=False)
class LevelTransfer:
    """Describe one collective of a hierarchical gradient reduction.

    Attributes:
        group: the ranks of the collective.
        bits: bits per element if quantized; None: elements are sent in the communication dtype.
        residual: elements of the rounding error to keep and add in the next reduction; 0: it is dropped.
    """

    group: RankGroup
    bits: int | None
    residual: int


def _level_transfers(levels: Sequence[WireLevel], numel: int, mesh: CountingMesh) -> tuple[LevelTransfer, ...]:
    """Return the collectives of ``levels``; the first one sends ``numel`` elements."""
    residuals = residual_numels(numel, levels, mesh.size)
    return tuple(
        LevelTransfer(RankGroup(mesh, level.axes), level.bits, kept)
        for level, kept in zip(levels, residuals, strict=True)
    )


@dataclass(frozen=True, eq=False)
class ShardSpecs:
    """Hold the shard specs of one flat's parts under its plan, and the groups of the collectives that move them.

    Attributes:
        parameters, gradients, states: as in :class:`npuzero.Plan`.
        after_forward: of parameters between forward and backward; between: of parameters between micro-batches. The
            same object if they are equal, so that one copy serves both.
        deeper: states - gradients (the axes that shard states but not gradients), over which R3 scatters R2's result.
        beyond: D - states (the axes of D that do not shard states), over which R3 sums what several ranks keep.
        scatter, deepen, spread: the collectives of R2, and of R3 over ``deeper`` and ``beyond``.
        restored: states - parameters (the axes that shard states but not parameters), over which R4 gathers.
        averaged: the ranks over which gradients are averaged.
        owners: the ranks with different elements of the states.
        divided: the ranks with different elements of the unsharded parameters.
        alike: the ranks with the same elements of the unsharded parameters; initial values are the first rank's.
        tied: whether the first and the last stage of a pipeline share the flat and both train it.
        lag: as in the plan.
    """

    parameters: ShardSpec
    after_forward: ShardSpec
    between: ShardSpec
    gradients: ShardSpec
    states: ShardSpec
    deeper: RankGroup
    beyond: RankGroup
    scatter: Sequence[LevelTransfer]
    deepen: Sequence[LevelTransfer]
    spread: Sequence[LevelTransfer]
    restored: RankGroup
    averaged: RankGroup
    owners: RankGroup
    divided: RankGroup
    alike: RankGroup
    tied: bool
    lag: int

    @staticmethod
    def of(plan: Plan, layout: FlatLayout, mesh: CountingMesh, strict: bool) -> ShardSpecs:
        """Return the shard specs of a flat of this layout under ``plan``."""
        parameters = ShardSpec.of(plan.parameters, layout, mesh, strict)
        after_forward, between = plan.held_after_forward, plan.held_between
        held = {placement: ShardSpec.of(placement, layout, mesh, strict) for placement in (after_forward, between)}
        gradients = ShardSpec.of(plan.gradients, layout, mesh, strict)
        states = ShardSpec.of(plan.states, layout, mesh, strict)
        precision = plan.precision
        return ShardSpecs(
            parameters=replace(parameters, guarded=parameters.guarded or plan.parameters.far),
            after_forward=held[after_forward],
            between=held[between],
            gradients=gradients,
            states=states,
            deeper=RankGroup(mesh, plan.deeper),
            beyond=RankGroup(mesh, plan.beyond),
            scatter=_level_transfers(levels_of(precision, plan.gradients.axes, mesh.size), layout.numel, mesh),
            deepen=_level_transfers(levels_of(precision, plan.deeper, mesh.size), gradients.numel, mesh),
            spread=_level_transfers(levels_beyond(precision, plan.beyond, mesh.size), states.numel, mesh),
            restored=RankGroup(mesh, plan.restored),
            averaged=RankGroup(mesh, plan.averaged),
            owners=RankGroup(mesh, plan.owners),
            divided=RankGroup(mesh, plan.divided),
            alike=RankGroup(mesh, plan.alike),
            tied=plan.tied and mesh.shape.pipe > 1,
            lag=plan.lag,
        )

    @property
    def apart(self) -> bool:
        """Return whether unsharded parameters need a separate buffer, with memory only while they are unsharded."""
        return self.parameters.cut or self.parameters.far

    def more(self, held: ShardSpec) -> bool:
        """Return whether ``held`` keeps more of the parameters on the device than the plan does between steps."""
        resting = self.parameters
        if resting.far:  # between steps no parameters are on the device
            return not held.far
        return held.group.size < resting.group.size or (resting.guarded and not held.guarded)

    @property
    def copied(self) -> set[ShardSpec]:
        """Return the specs within a step that need a separate copy: more than the local shard, less than unsharded."""
        return {held for held in (self.after_forward, self.between) if self.more(held) and held.cut}

    @property
    def summed(self) -> RankGroup | None:
        """Return the group of the first collective of a gradient's reduction; None: there is no collective."""
        return next((hop.group for hop in (*self.scatter, *self.deepen, *self.spread)), None)
