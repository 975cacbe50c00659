"""Record how a parameter relates to mesh axes: replicated, cut or summed over the ranks along an axis."""

from __future__ import annotations

from torch import nn

from npuzero.errors import ConfigError, did_you_mean
from npuzero.plan import AXES, PIPE, Relation, Relations, default_relation

_SAID = "_npuzero_relations"


def relate_parameter(parameter: nn.Parameter, axis: str, relation: Relation) -> None:
    """Record the relation of ``parameter`` to ``axis``; before :func:`npuzero.zero`, with the same value on all ranks.

    Along ``pipe`` the relation is between the first and the last stage of a pipeline; record it on both.

    Raises:
        ConfigError: ``axis`` is not a mesh axis.
    """
    if axis not in AXES:
        raise ConfigError(
            "relation", expected=f"an axis of {AXES}", got=repr(axis), do=did_you_mean(axis, AXES, "Name an axis.")
        )
    setattr(parameter, _SAID, {**_stored_relations(parameter), axis: relation})


def get_relations(parameter: nn.Parameter) -> dict[str, Relation]:
    """Return the recorded relations of ``parameter`` that differ from the default, by axis, in mesh order."""
    said = _stored_relations(parameter)
    return {axis: said[axis] for axis in AXES if axis in said and said[axis] is not default_relation(axis)}


def get_relation(parameter: nn.Parameter, axis: str) -> Relation | None:
    """Return the recorded relation of ``parameter`` to ``axis``, also if it is the default; None: not recorded."""
    return _stored_relations(parameter).get(axis)


def _stored_relations(parameter: nn.Parameter) -> dict[str, Relation]:
    said: dict[str, Relation] = getattr(parameter, _SAID, {})
    return said


def is_tied(parameter: nn.Parameter) -> bool:
    """Return whether the first and the last stage of a pipeline share ``parameter``."""
    return PIPE in get_relations(parameter)  # the default along pipe is different parameters per stage


def relations_key(parameter: nn.Parameter) -> Relations:
    """Return :func:`get_relations` as a hashable key."""
    return tuple(get_relations(parameter).items())
