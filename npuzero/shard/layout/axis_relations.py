"""What is said of a parameter: what the ranks along an axis of the mesh have of it."""

from __future__ import annotations

from torch import nn

from npuzero.errors import ConfigError, did_you_mean
from npuzero.plan import AXES, PIPE, Relation, Relations, default_relation

_SAID = "_npuzero_relations"


def relate_parameter(parameter: nn.Parameter, axis: str, relation: Relation) -> None:
    """Say what ranks along ``axis`` have of ``parameter``; before :func:`npuzero.zero`, and alike on all ranks.

    Along ``pipe``: what the first and the last stage of a pipeline have, on both of which it is said.

    Raises:
        ConfigError: there is no such axis.
    """
    if axis not in AXES:
        raise ConfigError(
            "relation", expected=f"an axis of {AXES}", got=repr(axis), do=did_you_mean(axis, AXES, "Name an axis.")
        )
    setattr(parameter, _SAID, {**_stored_relations(parameter), axis: relation})


def get_relations(parameter: nn.Parameter) -> dict[str, Relation]:
    """Return what has been said of ``parameter`` that is not the usual, by axis, in mesh order."""
    said = _stored_relations(parameter)
    return {axis: said[axis] for axis in AXES if axis in said and said[axis] is not default_relation(axis)}


def get_relation(parameter: nn.Parameter, axis: str) -> Relation | None:
    """Return what has been said of ``parameter`` along ``axis``, the usual included; None: nothing."""
    return _stored_relations(parameter).get(axis)


def _stored_relations(parameter: nn.Parameter) -> dict[str, Relation]:
    said: dict[str, Relation] = getattr(parameter, _SAID, {})
    return said


def is_tied(parameter: nn.Parameter) -> bool:
    """Return whether the first and the last stage of a pipeline have ``parameter`` in common."""
    return PIPE in get_relations(parameter)  # where the usual is that stages have different ones


def relations_key(parameter: nn.Parameter) -> Relations:
    """Return the same, to compare by."""
    return tuple(get_relations(parameter).items())
