"""Parts of a model that run forward and backward by themselves, in any order: the stages that one rank of a pipeline
has. A model that is not divided is one part.

What a pass begins, brings and ends is its part's. So is the number of its backward passes in a step, by which the last
one is foreseen: there R3 of the part's gradients runs beside backward, while other parts have passes to come.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from torch import nn

from npuzero.errors import ConfigError
from npuzero.shard.parameters.prefetch import ExecutionTrace
from npuzero.shard.state.unit import Unit

#: What names the units of a part: modules, which have them inside, or qualified names of such.
Group = Iterable["nn.Module | str"]


class ModelPart:
    """Hold what the passes of one part of a model have in common.

    Attributes:
        units: the root first, whose module is called for every part, then the part's own.
        trace: of its passes.
        count: its backward passes in this step so far.
        expected: as many as the last step had.
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
    """Return units in the order in which their gradients are reduced.

    Backward runs through the blocks in reverse; the root's gradients begin first and end last.
    """
    return [*reversed(units[1:]), units[0]]


def find_part_indices(
    units: Sequence[tuple[str, nn.Module | None]], groups: Sequence[Group]
) -> tuple[tuple[int, ...], ...]:
    """Return for each group the indices of its units, the root's among them.

    Args:
        units: name and module of each, the root first.
        groups: by modules or names; one stands for all units inside of it, of which there may be none.

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
