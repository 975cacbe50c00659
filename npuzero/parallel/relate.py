"""What a program says of parameters of its own parallel layers."""

from __future__ import annotations

from torch import nn

from npuzero.config import describe_value
from npuzero.errors import ConfigError, did_you_mean
from npuzero.plan import Relation
from npuzero.shard.layout.axis_relations import relate_parameter

_WORDS = {relation.value: relation for relation in Relation}


def relate(what: nn.Module | nn.Parameter, **relations: str) -> None:
    """Say what the ranks along axes of the mesh have of a parameter, or of all of a module's.

    Call it before :func:`npuzero.zero`, alike on every rank. What nobody says is usual: ``averaged`` along the data
    axes, ``repeated`` along ``tensor``. It is for layers that compute with other ranks by themselves;
    ``parallel.tensor`` and ``parallel.ClassHead`` say it of theirs.

    Args:
        what: a parameter, or a module.
        relations: by axis (``pod``, ``node``, ``local``, ``tensor``; ``pipe``, in the first and the last stage, of what
            both have, such as a tied embedding) a word::

            averaged   ranks hold the same; gradients are the mean of theirs
            summed     ranks hold the same; gradients are the sum of theirs, of which each has a part
            cut        ranks hold different elements; gradients are each rank's own
            repeated   ranks hold the same, and their gradients are equal already

    Raises:
        ConfigError: no such axis or word, or nothing that has parameters.

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
