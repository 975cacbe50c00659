"""The mesh: the ranks of a world as node x local, and the groups that follow from it."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product

from npuzero.comm.communicator import Communicator
from npuzero.comm.world import World
from npuzero.errors import ConfigError
from npuzero.plan import AXES, LOCAL, NODE, Axes, MeshShape


class Mesh:
    """Arrange the ranks of a world as node x local: rank = node * local_size + local.

    Args:
        local_size: ranks in the ``local`` axis; None: those that share this host, which must be equally many and
            consecutive on every host.

    Raises:
        ConfigError: the size does not divide the world.
    """

    def __init__(self, world: World, local_size: int | None = None) -> None:
        self.world = world
        local = _ranks_per_host(world) if local_size is None else local_size
        if local < 1 or world.size % local:
            raise ConfigError(
                "mesh: local_size",
                expected=f"a positive divisor of the {world.size} ranks",
                got=str(local),
                do="Choose groups of equal size.",
            )
        self.shape = MeshShape(node=world.size // local, local=local)

    def ranks(self, axes: Axes) -> tuple[int, ...]:
        """Return the ranks of this rank's group along ``axes``, in shard order: the first axis outermost."""
        self._check(axes)
        here = {NODE: self.world.rank // self.shape.local, LOCAL: self.world.rank % self.shape.local}
        sizes = {NODE: self.shape.node, LOCAL: self.shape.local}
        group = []
        for place in product(*(range(sizes[axis]) for axis in axes)):
            there = {**here, **dict(zip(axes, place, strict=True))}
            group.append(there[NODE] * self.shape.local + there[LOCAL])
        return tuple(group)

    def index(self, axes: Axes) -> int:
        """Return this rank's place in ``ranks(axes)``."""
        self._check(axes)
        return self.shape.index(axes, self.world.rank)

    def size(self, axes: Axes) -> int:
        """Return the number of ranks in ``ranks(axes)``."""
        self._check(axes)
        return self.shape.size(axes)

    def communicator(self, axes: Axes, purpose: str) -> Communicator:
        """Return the communicator of ``ranks(axes)`` in that order, made at the first call.

        ``purpose`` ("gather", "restore", "reduce", "control"; any word) names a channel of its own, so that the order
        of gathers relative to reductions need not agree between ranks.
        """
        return self.world.communicator(self.ranks(axes), purpose)

    def part(self, axes: Axes) -> World:
        """Return a world of ``ranks(axes)`` in that order, see :meth:`World.part`: to train one model in each group."""
        return self.world.part(self.ranks(axes))

    def _check(self, axes: Sequence[str]) -> None:
        if len(set(axes)) != len(axes) or not set(axes) <= set(AXES):
            raise ConfigError(
                "mesh: axes", expected=f"different axes among {AXES}", got=repr(tuple(axes)), do="Name each axis once."
            )


def _ranks_per_host(world: World) -> int:
    local = world.local
    size = len(local)
    regular = local == tuple(range(local[0], local[0] + size)) and local[0] % size == 0 and world.size % size == 0
    if world.exchange(size if regular else 0) != [size] * world.size:
        raise ConfigError(
            "mesh: local_size",
            expected="consecutive ranks on each host, equally many",
            got=f"ranks {local} of {world.size} on the host of rank {world.rank}",
            do="Place the ranks evenly, or give local_size.",
        )
    return size
