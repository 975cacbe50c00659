"""Where a part of the training state rests: over which mesh axes it is sharded, and in which memory."""

from __future__ import annotations

import enum
from dataclasses import dataclass

from npuzero.errors import keywords

NODE, LOCAL = "node", "local"
#: The data axes of a mesh in rank order: global rank = node * local_size + local.
AXES = (NODE, LOCAL)

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


@keywords()
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


def axes_beyond(states: Axes, averaged: Axes = AXES) -> Axes:
    """Return D - states: the axes over which gradients are averaged and states replicated, in mesh order."""
    return tuple(axis for axis in averaged if axis not in states)
