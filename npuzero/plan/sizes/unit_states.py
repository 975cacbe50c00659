"""Units of a model as its schedule tracks them: their flat parameters, and the state of these at each point."""

from __future__ import annotations

import enum
import itertools
from collections.abc import Iterable, Iterator, Sequence

from npuzero.plan.presets import Plan
from npuzero.plan.sizes.flat_sizes import FlatKind, FlatSize
from npuzero.plan.table.mesh_shape import MeshShape
from npuzero.plan.table.step_moves import FreeBuffer


class PlannedUnitState(enum.Enum):
    """Name the state of a unit's parameters, as in the engine."""

    SHARDED, GATHERING, WHOLE, HELD = range(4)


class PlannedUnit:
    """Follow a unit: its flat parameters as runs of equal neighbours, and their state at this point of the schedule."""

    def __init__(self, index: int, runs: list[tuple[FlatKind, int]]) -> None:
        self.index = index
        self.runs = runs
        self.trainable = [(kind, count) for kind, count in runs if kind.trainable]
        self.has_frozen = len(self.trainable) < len(runs)
        self.apart = any(kind.apart for kind, _ in runs)
        self.state = PlannedUnitState.SHARDED if self.apart else PlannedUnitState.WHOLE
        # By run, what each phase keeps; ``held`` is the current entry, even while the unit is unsharded.
        self.after_forward = [kind.after_forward for kind, _ in runs]
        self.between = [kind.between for kind, _ in runs]
        self.rests = [kind.rests for kind, _ in runs]
        self.held = self.rests
        self.missing = False  # backward has not yet completed its gradients
        self.gathers = self.restores = 0  # collectives in flight
        self.codes: list[FreeBuffer] = []  # buffers of gathers in flight
        self.passes = self.passed = 0  # backward passes of the step for this unit: in total, and so far
        self.far = any(kind.far for kind, _ in self.trainable)

    @property
    def first(self) -> bool:
        """Tell whether the current (or next) backward pass is the step's first for this unit."""
        return not self.passed

    @property
    def last(self) -> bool:
        """Tell whether the current (or next) backward pass is the step's last for this unit."""
        return self.passed == self.passes - 1


def build_planned_units(flats: Sequence[FlatSize], plan: Plan, mesh: MeshShape) -> list[PlannedUnit]:
    """Return the units of flat parameters in order, the root first; includes units without flat parameters."""
    runs: list[list[tuple[FlatKind, int]]] = [[] for _ in range(max((flat.unit for flat in flats), default=-1) + 1)]
    # Equal flats share one FlatKind and its cached results. Plans are compared by identity: comparing values is slow.
    kinds: dict[tuple[object, ...], FlatKind] = {}
    for flat, equal in itertools.groupby(flats):
        own = flat.plan or plan
        key = flat.numel, flat.dtype, flat.trainable, id(own)
        if key not in kinds:
            kinds[key] = FlatKind(flat.numel, flat.dtype, flat.trainable, own, mesh)
        runs[flat.unit].append((kinds[key], sum(1 for _ in equal)))
    return [PlannedUnit(index, each) for index, each in enumerate(runs)]


def walk_units(units: Iterable[PlannedUnit], spans: Sequence[int]) -> Iterator[tuple[PlannedUnit, bool]]:
    """Yield (unit, True) when a unit starts and (unit, False) after its nested units have ended."""
    within: list[PlannedUnit] = []
    for unit in units:
        while within and not within[-1].index < unit.index <= spans[within[-1].index]:
            yield within.pop(), False
        within.append(unit)
        yield unit, True
    while within:
        yield within.pop(), False


class UnitPart:
    """Follow the passes of a part of the model, or of all of it."""

    def __init__(self, units: list[PlannedUnit], spans: Sequence[int]) -> None:
        self.units = units
        # ``trace``: in the order forward starts them; ``by_end`` and ``ended``: in the order it ends them. Only units
        # that are sharded are prefetched.
        self.trace = [unit for unit in units if unit.apart]
        self.by_end = [unit for unit, begins in walk_units(units, spans) if not begins]
        self.ended = [unit for unit in self.by_end if unit.apart]

    def done(self, unit: PlannedUnit) -> bool:
        """Tell whether the current backward pass, if there is one, has finished ``unit``."""
        # Backward is running if any unit is missing gradients; asked last, since it visits all units.
        return bool(unit.trainable) and not unit.missing and any(each.missing for each in self.units)
