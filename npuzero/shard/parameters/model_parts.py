"""Parts of a model that run forward and backward separately, in any order: the pipeline stages of one rank.

An undivided model is one part. Each part has its passes, and a count of its backward passes in a step. The count
predicts the last one: R3 of the part's gradients overlaps with it, while other parts still have passes to run.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from torch import nn

from npuzero.errors import ConfigError
from npuzero.shard.parameters.prefetch import ExecutionTrace
from npuzero.shard.state.unit import Unit

#: The units of a part, given by modules that contain them, or by qualified names of such modules.
Group = Iterable["nn.Module | str"]


class ModelPart:
    """Hold the state shared by the passes of one part of a model.

    Attributes:
        units: the root first, since its module is called for every part; then the units of this part.
        trace: execution order of its passes.
        count: backward passes of the part in this step so far.
        expected: backward passes of the part in the last step.
    """

    def __init__(self, units: Sequence[Unit]) -> None:
        self.units = units
        self.trace = ExecutionTrace()
        self.count = 0
        self.expected = 0
        self._indices = frozenset(unit.index for unit in units)

    def __contains__(self, unit: Unit) -> bool:
        return unit.index in self._indices


def reduction_order(units: Sequence[Unit]) -> list[Unit]:
    """Return units in the order of their gradient reductions.

    Backward runs through the blocks in reverse; the root's gradients begin first and end last.
    """
    return [*reversed(units[1:]), units[0]]


def find_part_indices(
    units: Sequence[tuple[str, nn.Module | None]], groups: Sequence[Group]
) -> tuple[tuple[int, ...], ...]:
    """Return the indices of the units of each group, including the root.

    Args:
        units: (name, module) pairs, the root first.
        groups: modules or names; each selects all units inside it, possibly none.

    Raises:
        ConfigError: a unit is in no group.
    """
    found = tuple(_find_group_indices(units, group) for group in groups)
    alone = set(range(len(units))).difference(*found)
    if alone:
        raise ConfigError(
            f"parts of a model: unit {units[min(alone)][0]!r}",
            expected="every unit in one of them at least",
            got=f"{len(found)} parts without it",
            do="Name its module, or one around it, in the part that calls it.",
        )
    return found


def _find_group_indices(units: Sequence[tuple[str, nn.Module | None]], group: Group) -> tuple[int, ...]:
    found = {0}
    for named in group:
        if isinstance(named, nn.Module):
            inside = {id(module) for module in named.modules()}
            found |= {i for i, (_, module) in enumerate(units) if id(module) in inside}
        else:
            found |= {i for i, (name, _) in enumerate(units) if f"{name}.".startswith(f"{named}.")}
    return tuple(sorted(found))
