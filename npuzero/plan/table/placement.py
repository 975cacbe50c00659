"""Placements: the mesh axes that a part of the training state is sharded over, and its memory."""

from __future__ import annotations

import enum
from collections.abc import Iterable
from dataclasses import dataclass

from npuzero.errors import refuse_unknown_keywords

PIPE, POD, NODE, LOCAL, TENSOR = "pipe", "pod", "node", "local", "tensor"
#: The axes of a mesh in rank order, outermost first: neighbours along the last axis have consecutive ranks.
AXES = (PIPE, POD, NODE, LOCAL, TENSOR)
#: Axes along which ranks compute different data.
DATA = (POD, NODE, LOCAL)
#: Axes of the ranks that train the same modules.
STAGE = (POD, NODE, LOCAL, TENSOR)
#: A view of neighbouring ranks of the data axes that share sequences; nothing is sharded over it.
SEQUENCE = "sequence"
#: A view of pipe: the ranks of the first and of the last stage, which may share a parameter.
ENDS = "ends"

Axes = tuple[str, ...]


class Memory(enum.Enum):
    """Name a memory space.

    Example::

        report = npuzero.predict(net, "zero3", world=8)
        print(report.held[npuzero.Memory.DEVICE]["parameters"])
    """

    DEVICE = "device"
    HOST = "host"
    NVME = "nvme"

    __hash__ = object.__hash__  # Enum's hash is a Python function, and predictions call it a million times


@refuse_unknown_keywords()
@dataclass(frozen=True)
class Placement:
    """Describe where one part of the training state is stored.

    Attributes:
        axes: mesh axes it is sharded over, outermost first; ``()`` means unsharded.
        memory: memory space of the shard.
        share: fraction of a rank's shard, above 0 and up to 1, that is stored in ``memory``; the first elements, up to
            the remaining fraction, stay on the device.

    Example::

        everywhere = npuzero.Placement(("node", "local"))  # sharded over all ranks
        unsharded = npuzero.Placement()
        mostly = npuzero.Placement(("node", "local"), npuzero.Memory.HOST, share=0.8)  # a fifth of a shard stays
    """

    axes: Axes = ()
    memory: Memory = Memory.DEVICE
    share: float = 1.0

    @property
    def far(self) -> bool:
        """Tell whether any of it is offloaded from the device."""
        return self.memory is not Memory.DEVICE


#: Unsharded, on each rank's device.
WHOLE = Placement()


def axes_between(deep: Axes, shallow: Axes) -> Axes:
    """Return the axes that shard ``deep`` further than ``shallow``, a prefix of it."""
    return deep[len(shallow) :]


def axes_over(owners: Iterable[Axes], stages: int = 1) -> Axes:
    """Return the axes for one sum over the unique elements of several flat parameters with these ``owners``.

    Equal owners: those axes. Different owners: all axes, and ranks that own the same elements count once. Several
    pipeline ``stages``: also all axes, since another stage may have other owners, or no flat parameters.
    """
    different = tuple(dict.fromkeys(owners))
    if stages > 1 or len(different) > 1:
        return AXES
    return different[0] if different else ()


def axes_beyond(states: Axes, reduced: Axes = DATA) -> Axes:
    """Return D - states: the axes that sum gradients but replicate states, in mesh order."""
    return tuple(axis for axis in reduced if axis not in states)
