"""What the ranks along an axis of the mesh have of a parameter, and what becomes of its gradients there.

For each axis and parameter exactly one word::

    relation   ranks along the axis hold   gradients along it        norm, overflow, checkpoint
    averaged   the same                    summed, times 1 / ranks   once
    summed     the same                    summed                    once
    cut        different elements          nothing: each has its own every rank's
    repeated   the same                    nothing: equal already    once

A rank's data are its own along the data axes, so there parameters are ``averaged`` unless they are ``cut``. Stages of a
pipeline have different parameters: along ``pipe`` they are ``cut``, but for those that the first and the last have in
common (a tied embedding). What is said of these along ``pipe`` holds along ``ends``, which are those two. D, over
which rule R3 brings gradients together, is what is averaged or summed: a property of a flat, not of the mesh. (The
words are those of sharding types: replicated with partial gradients, varying, invariant.)
"""

from __future__ import annotations

import enum

from npuzero.plan.table.placement import AXES, DATA, ENDS, PIPE, Axes


class Relation(enum.Enum):
    """Name what the ranks along an axis have of a parameter."""

    AVERAGED = "averaged"
    SUMMED = "summed"
    CUT = "cut"
    REPEATED = "repeated"


#: The relations of a parameter that are not the usual ones, in the order of the axes.
Relations = tuple[tuple[str, Relation], ...]


def default_relation(axis: str) -> Relation:
    """Return the relation of a parameter that nobody has said anything of."""
    if axis in DATA:
        return Relation.AVERAGED
    return Relation.CUT if axis == PIPE else Relation.REPEATED


def axes_with(relations: Relations, *words: Relation) -> Axes:
    """Return the axes along which the relation is one of ``words``, in mesh order; ``ends`` for ``pipe`` if uncut."""
    by_axis = {axis: dict(relations).get(axis, default_relation(axis)) for axis in AXES}
    uncut = by_axis[PIPE] is not Relation.CUT
    return tuple(ENDS if axis == PIPE and uncut else axis for axis, word in by_axis.items() if word in words)
