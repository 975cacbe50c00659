"""Relations: how the ranks along a mesh axis hold a parameter, and how its gradients are reduced there.

Each pair of axis and parameter has exactly one relation::

    relation   ranks along the axis hold   gradients along it        norm, overflow, checkpoint
    averaged   the same                    summed, times 1 / ranks   once
    summed     the same                    summed                    once
    cut        different elements          not reduced               every rank's
    repeated   the same                    not reduced: equal        once

Ranks along the data axes see different data, so parameters are ``averaged`` there unless they are ``cut``. Pipeline
stages have different parameters: along ``pipe`` they are ``cut``, except those shared by the first and the last stage
(a tied embedding). A relation of these to ``pipe`` applies to ``ends``, the axis of those two stages. D, the axes of
rule R3, are the averaged and summed ones: a property of a flat parameter, not of the mesh. (The words correspond to
sharding types: replicated with partial gradients, varying, invariant.)
"""

from __future__ import annotations

import enum

from npuzero.plan.table.placement import AXES, DATA, ENDS, PIPE, Axes


class Relation(enum.Enum):
    """Name how the ranks along an axis hold a parameter."""

    AVERAGED = "averaged"
    SUMMED = "summed"
    CUT = "cut"
    REPEATED = "repeated"


#: Relations of a parameter that differ from the default, in the order of the axes.
Relations = tuple[tuple[str, Relation], ...]


def default_relation(axis: str) -> Relation:
    """Return the relation that holds along ``axis`` unless another is given."""
    if axis in DATA:
        return Relation.AVERAGED
    return Relation.CUT if axis == PIPE else Relation.REPEATED


def axes_with(relations: Relations, *words: Relation) -> Axes:
    """Return the axes with a relation among ``words``, in mesh order; ``ends`` stands for ``pipe`` if that is uncut."""
    by_axis = {axis: dict(relations).get(axis, default_relation(axis)) for axis in AXES}
    uncut = by_axis[PIPE] is not Relation.CUT
    return tuple(ENDS if axis == PIPE and uncut else axis for axis, word in by_axis.items() if word in words)
