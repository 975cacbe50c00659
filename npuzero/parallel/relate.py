"""Declare how the ranks relate on parameters of a program's own parallel layers."""

from __future__ import annotations

from torch import nn

from npuzero.config import describe_value
from npuzero.errors import ConfigError, did_you_mean
from npuzero.plan import Relation
from npuzero.shard.layout.axis_relations import relate_parameter

_WORDS = {relation.value: relation for relation in Relation}


def relate(what: nn.Module | nn.Parameter, **relations: str) -> None:
    """Set the relation of a parameter, or of all parameters of a module, along axes of the mesh.

    Call it before :func:`npuzero.zero`, identically on every rank. The defaults are ``averaged`` along the data axes
    and ``repeated`` along ``tensor``. Use it for layers that communicate themselves; ``parallel.tensor`` and
    ``parallel.ClassHead`` set the relations of their parameters.

    Args:
        what: a parameter, or a module.
        relations: by axis (``pod``, ``node``, ``local``, ``tensor``; ``pipe``, for parameters that the first and the
            last stage share, such as a tied embedding) a word::

            averaged   ranks hold the same; gradients are averaged
            summed     ranks hold the same; each has a partial gradient, and gradients are summed
            cut        ranks hold different elements; gradients are each rank's own
            repeated   ranks hold the same, and their gradients are equal already

    Raises:
        ConfigError: no such axis or word, or ``what`` is neither a parameter nor a module.

    Example::

        npuzero.parallel.relate(net[0], tensor="repeated")
        model = npuzero.zero(net)
    """
    parameters = _list_parameters(what)
    for axis, word in relations.items():
        if word not in _WORDS:
            raise ConfigError(
                f"relate: {axis}",
                expected=f"one of {', '.join(_WORDS)}",
                got=repr(word),
                do=did_you_mean(word, tuple(_WORDS), "Choose a relation."),
            )
        for parameter in parameters:
            relate_parameter(parameter, axis, _WORDS[word])


def _list_parameters(what: object) -> list[nn.Parameter]:
    if isinstance(what, nn.Parameter):
        return [what]
    if isinstance(what, nn.Module):
        return list(what.parameters())
    raise ConfigError(
        "relate", expected="a module or a parameter", got=describe_value(what), do="Pass what has the parameters."
    )
