"""The units of a model as its schedule follows them: their flats, and where their parameters are at this point."""

from __future__ import annotations

import enum
import itertools
from collections.abc import Iterable, Iterator, Sequence

from npuzero.plan.presets import Plan
from npuzero.plan.sizes.flat_sizes import FlatKind, FlatSize
from npuzero.plan.table.mesh_shape import MeshShape
from npuzero.plan.table.step_moves import FreeBuffer


class PlannedUnitState(enum.Enum):
    """Name who holds a unit's parameters, as in the engine."""

    SHARDED, GATHERING, WHOLE, HELD = range(4)


class PlannedUnit:
    """Follow a unit: its flats as runs of equal neighbours, and where its parameters are at this point of the
    schedule.
    """

    def __init__(self, index: int, runs: list[tuple[FlatKind, int]]) -> None:
        self.index = index
        self.runs = runs
        self.trainable = [(kind, count) for kind, count in runs if kind.trainable]
        self.has_frozen = len(self.trainable) < len(runs)
        self.apart = any(kind.apart for kind, _ in runs)
        self.state = PlannedUnitState.SHARDED if self.apart else PlannedUnitState.WHOLE
        # By run, what is held of it at each moment; and now, though it may be unsharded beside.
        self.after_forward = [kind.after_forward for kind, _ in runs]
        self.between = [kind.between for kind, _ in runs]
        self.rests = [kind.rests for kind, _ in runs]
        self.held = self.rests
        self.missing = False  # the present backward has still to bring gradients
        self.gathers = self.restores = 0  # collectives under way
        self.codes: list[FreeBuffer] = []  # what is lent to gathers under way
        self.passes = self.passed = 0  # backward passes that the step has for it, and has had so far
        self.far = any(kind.far for kind, _ in self.trainable)

    @property
    def first(self) -> bool:
        """Tell whether the present, or next, backward pass is the step's first for this unit."""
        return not self.passed

    @property
    def last(self) -> bool:
        """Tell whether it is the last."""
        return self.passed == self.passes - 1


def build_planned_units(flats: Sequence[FlatSize], plan: Plan, mesh: MeshShape) -> list[PlannedUnit]:
    """Return the units of flats that stand in order, the root first; one that has no flats is there, too."""
    runs: list[list[tuple[FlatKind, int]]] = [[] for _ in range(max((flat.unit for flat in flats), default=-1) + 1)]
    # What a kind has worked out is worked out once; by the plan's identity, since its value takes long to compare.
    kinds: dict[tuple[object, ...], FlatKind] = {}
    for flat, equal in itertools.groupby(flats):
        own = flat.plan or plan
        key = flat.numel, flat.dtype, flat.trainable, id(own)
        if key not in kinds:
            kinds[key] = FlatKind(flat.numel, flat.dtype, flat.trainable, own, mesh)
        runs[flat.unit].append((kinds[key], sum(1 for _ in equal)))
    return [PlannedUnit(index, each) for index, each in enumerate(runs)]


def walk_units(units: Iterable[PlannedUnit], spans: Sequence[int]) -> Iterator[tuple[PlannedUnit, bool]]:
    """Yield each unit as it begins (True), and as it ends: when those inside of it have, which follow it."""
    within: list[PlannedUnit] = []
    for unit in units:
        while within and not within[-1].index < unit.index <= spans[within[-1].index]:
            yield within.pop(), False
        within.append(unit)
        yield unit, True
    while within:
        yield within.pop(), False


class UnitPart:
    """Follow the passes of a part of the model, which may be all of it."""

    def __init__(self, units: list[PlannedUnit], spans: Sequence[int]) -> None:
        self.units = units
        # In the order in which forward begins them, and ends; only what is sharded is gathered ahead.
        self.trace = [unit for unit in units if unit.apart]
        self.by_end = [unit for unit, begins in walk_units(units, spans) if not begins]
        self.ended = [unit for unit in self.by_end if unit.apart]

    def done(self, unit: PlannedUnit) -> bool:
        """Tell whether the backward pass under way, if one is, has left ``unit``."""
        # In backward some unit is missing; that is asked last, for it asks all of them.
        return bool(unit.trainable) and not unit.missing and any(each.missing for each in self.units)
