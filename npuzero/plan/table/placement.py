"""Where a part of the training state rests: over which mesh axes it is sharded, and in which memory."""

from __future__ import annotations

import enum
from collections.abc import Iterable
from dataclasses import dataclass

from npuzero.errors import refuse_unknown_keywords

PIPE, POD, NODE, LOCAL, TENSOR = "pipe", "pod", "node", "local", "tensor"
#: The axes of a mesh in rank order, outermost first: neighbours along the last one have neighbouring ranks.
AXES = (PIPE, POD, NODE, LOCAL, TENSOR)
#: Those along which ranks compute with data of their own.
DATA = (POD, NODE, LOCAL)
#: Those whose ranks train the same modules.
STAGE = (POD, NODE, LOCAL, TENSOR)
#: A view of neighbouring ranks of the data axes, which share sequences; nothing is sharded over it.
SEQUENCE = "sequence"
#: A view of pipe: the ranks of the first and of the last stage, which may have a parameter in common.
ENDS = "ends"

Axes = tuple[str, ...]


class Memory(enum.Enum):
    """Name where bytes rest.

    Example::

        report = npuzero.predict(net, "zero3", world=8)
        print(report.held[npuzero.Memory.DEVICE]["parameters"])
    """

    DEVICE = "device"
    HOST = "host"
    NVME = "nvme"

    __hash__ = object.__hash__  # Enum's own is Python's, and predictions ask it a million times


@refuse_unknown_keywords()
@dataclass(frozen=True)
class Placement:
    """Say where one part of the training state is kept.

    Attributes:
        axes: mesh axes it is sharded over, outermost first; ``()`` means unsharded.
        memory: where it rests.
        share: the part of a rank's shard, above 0 and up to 1, that rests in ``memory``; the rest of it, in front,
            rests on the device.

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
        """Tell whether any of it rests elsewhere than on the device."""
        return self.memory is not Memory.DEVICE


#: All of it on each rank's device, as without a plan.
WHOLE = Placement()


def axes_between(deep: Axes, shallow: Axes) -> Axes:
    """Return the axes by which ``deep`` is sharded further than ``shallow``, a prefix of it."""
    return deep[len(shallow) :]


def axes_over(owners: Iterable[Axes], stages: int = 1) -> Axes:
    """Return the axes that one sum over unique elements of several flats runs over, whose ``owners`` these are.

    Where they have the same it is theirs; else all, and of ranks that own the same elements one counts. Over several
    ``stages`` it is all, too: other stages have flats of other owners, or none.
    """
    different = tuple(dict.fromkeys(owners))
    if stages > 1 or len(different) > 1:
        return AXES
    return different[0] if different else ()


def axes_beyond(states: Axes, reduced: Axes = DATA) -> Axes:
    """Return D - states: the axes over which gradients are summed and states replicated, in mesh order."""
    return tuple(axis for axis in reduced if axis not in states)
