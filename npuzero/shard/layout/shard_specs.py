"""Where the parts of one flat rest: over which ranks each is sharded, in which memory, and this rank's range.

A plan says this of a model's training state; here it is said of one flat, so flats of one engine may follow different
plans. What moves a part (:class:`~npuzero.shard.parameters.all_gather.ParameterGatherer`, ``Reducer``, ``Restorer``)
reads the flat alone.
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
    """Describe the ranks along some axes of the mesh, this one among them.

    Attributes:
        axes: outermost first.
        size: their number.
        index: which of them this rank is.
        many: whether there are others; where not, a collective over the group is the identity and is left out.
    """

    def __init__(self, mesh: CountingMesh, axes: Axes) -> None:
        self.axes = axes
        self.size = mesh.size(axes)
        self.index = mesh.index(axes)
        self.many = self.size > 1
        self._mesh = mesh

    def communicator(self, purpose: str) -> Communicator:
        """Return the communicator of these ranks on the channel ``purpose``, made at the first call."""
        return self._mesh.communicator(self.axes, purpose)


@dataclass(frozen=True, eq=False)
class ShardSpec:
    """Describe where one part of a flat rests.

    Attributes:
        group: the ranks it is sharded over: as many shards as they are, in their order.
        memory: where it lies.
        begin, end: this rank's shard, in elements of the flat.
        near: how many elements of the shard, its first ones, rest on the device whatever the memory of the others.
        guarded: whether programs are kept from it: it is sharded, or in strict mode would be, were there ranks beside
            this one; or it is parameters that rest off the device.
    """

    group: RankGroup
    memory: Memory
    begin: int
    end: int
    near: int
    guarded: bool

    @staticmethod
    def of(placement: Placement, layout: FlatLayout, mesh: CountingMesh, strict: bool) -> ShardSpec:
        """Return where ``placement`` puts a part of a flat of this layout."""
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
        """Return whether this rank has less than all of it."""
        return self.group.many

    @property
    def far(self) -> bool:
        """Return whether it rests elsewhere than on the device."""
        return self.memory is not Memory.DEVICE

    def within(self, outer: ShardSpec) -> slice:
        """Return this shard as a slice of ``outer``, sharded over fewer ranks: contiguous there, by the plan's law."""
        return slice(self.begin - outer.begin, self.end - outer.begin)


@dataclass(frozen=True, eq=False)
class LevelTransfer:
    """Describe one collective of a sum of gradients that goes level by level.

    Attributes:
        group: the ranks it is over.
        bits: of an element on a thin wire; None: it travels in the communication dtype.
        residual: elements of what rounding loses here, which is added the next time; 0: it is lost.
    """

    group: RankGroup
    bits: int | None
    residual: int


def _level_transfers(levels: Sequence[WireLevel], numel: int, mesh: CountingMesh) -> tuple[LevelTransfer, ...]:
    """Return the collectives of ``levels``, the first of which sends ``numel`` elements."""
    residuals = residual_numels(numel, levels, mesh.size)
    return tuple(
        LevelTransfer(RankGroup(mesh, level.axes), level.bits, kept)
        for level, kept in zip(levels, residuals, strict=True)
    )


@dataclass(frozen=True, eq=False)
class ShardSpecs:
    """Hold the rests of one flat's parts under its plan, and the groups that the rules move them over.

    Attributes:
        parameters, gradients, states: as :class:`npuzero.Plan` has them.
        after_forward: where parameters wait for backward; between: for the next micro-batch. One object where these are
            the same, so that one copy serves both.
        deeper: states - gradients (the axes that shard states but not gradients), over which R3 scatters R2's result.
        beyond: D - states (the axes of D that do not shard states), over which R3 sums what several ranks keep.
        scatter, deepen, spread: the collectives of R2, and of R3 over ``deeper`` and ``beyond``.
        restored: states - parameters (the axes that shard states but not parameters), over which R4 gathers.
        averaged: the ranks whose gradients are averaged.
        owners: the ranks that have different elements of the states.
        divided: those that have different elements of the unsharded parameters.
        alike: those that have the same; the first one's values count.
        tied: whether the first and the last stage of a pipeline have the same, and both train it.
        lag: as the plan has it.
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
        """Return the row ``plan`` of the table, for a flat of this layout."""
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
        """Return whether unsharded parameters lie elsewhere than what rests of them, and come and go."""
        return self.parameters.cut or self.parameters.far

    def more(self, held: ShardSpec) -> bool:
        """Return whether more of the parameters is on the device where they rest as ``held`` than between steps."""
        resting = self.parameters
        if resting.far:  # none of it stays there between steps
            return not held.far
        return held.group.size < resting.group.size or (resting.guarded and not held.guarded)

    @property
    def copied(self) -> set[ShardSpec]:
        """Return which of where parameters wait within a step takes a copy: more than rests, and not all of them."""
        return {held for held in (self.after_forward, self.between) if self.more(held) and held.cut}

    @property
    def summed(self) -> RankGroup | None:
        """Return the group of the first collective that a gradient goes through; None where it goes through none."""
        return next((hop.group for hop in (*self.scatter, *self.deepen, *self.spread)), None)
