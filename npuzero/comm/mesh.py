"""Arrange the ranks of a world in a device mesh with named axes, and derive its groups."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import product

from npuzero.arguments import describe_value
from npuzero.comm.communicator import Communicator
from npuzero.comm.world import World
from npuzero.errors import ConfigError, did_you_mean
from npuzero.plan import AXES, DATA, ENDS, PIPE, POD, SEQUENCE, TENSOR, Axes, MeshShape, divisors


class Mesh:
    """Arrange the ranks of a world along axes.

    The axes, outermost first: ``pipe`` (stages of a pipeline), the data axes ``pod``, ``node`` and ``local``, and
    ``tensor``, with neighbouring ranks. ``sequence`` is a view of the data axes: neighbours that share sequences.
    ``ends`` is a view of ``pipe``: its first and last stage, which may share parameters; other ranks have no such
    group.

    Args:
        local_size: ranks in the ``local`` axis; None: the ranks of this host, which must be consecutive and equally
            many on every host; with tensor ranks, the number of their groups per host.
        pipe, pod, tensor: sizes of these axes.
        sequence: ranks that share a sequence; a divisor of the data ranks.

    Attributes:
        shape: the sizes.
        local_size: as given.

    Raises:
        ConfigError: the sizes do not divide the world.

    Example::

        mesh = npuzero.Mesh(world)  # data ranks alone, as npuzero.zero() arranges them
        print(mesh.ranks(("node", "local")))
    """

    def __init__(
        self,
        world: World,
        local_size: int | None = None,
        *,
        pipe: int = 1,
        pod: int = 1,
        sequence: int = 1,
        tensor: int = 1,
    ) -> None:
        self.world = world
        self.local_size = local_size
        given = {PIPE: pipe, POD: pod, TENSOR: tensor, SEQUENCE: sequence}
        rest = world.size
        for axis in (PIPE, TENSOR, POD):
            rest = count_axis_groups(axis, given[axis], rest, world.size)
        local = _ranks_per_host(world, tensor, rest) if local_size is None else local_size
        node = count_axis_groups("local_size", local, rest, world.size)
        count_axis_groups(SEQUENCE, sequence, rest * pod, world.size)
        self.shape = MeshShape(node=node, local=local, **given)

    @staticmethod
    def of(world: World, shape: MeshShape) -> Mesh:
        """Return the mesh of these sizes."""
        return Mesh(world, shape.local, pipe=shape.pipe, pod=shape.pod, sequence=shape.sequence, tensor=shape.tensor)

    def __repr__(self) -> str:
        sizes = ", ".join(f"{axis}={self.size((axis,))}" for axis in (*AXES, SEQUENCE))
        return f"Mesh({sizes})"

    def ranks(self, axes: Axes) -> tuple[int, ...]:
        """Return the ranks of this rank's group along ``axes``, in shard order: the first axis outermost."""
        self._check(axes)
        if SEQUENCE in axes:  # neighbours along the data axes
            data, share = self.ranks(DATA), self.shape.sequence
            begin = data.index(self.world.rank) // share * share
            return data[begin : begin + share]
        here = {axis: index for axis, index in self.shape.place(self.world.rank).items() if axis in AXES}
        places = product(*(range(self.shape.size((axis,))) for axis in axes))
        return tuple(self.shape.rank({**here, **dict(zip(axes, place, strict=True))}) for place in places)

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

        ``purpose`` ("gather", "restore", "reduce", "control"; any word) names a separate channel, so that the order of
        all-gathers relative to reduce-scatters need not agree between ranks.
        """
        return self.world.communicator(self.ranks(axes), purpose)

    def part(self, axes: Axes) -> World:
        """Return a world of ``ranks(axes)`` in that order, to train one model in each group; see :meth:`World.part`."""
        return self.world.part(self.ranks(axes))

    def _check(self, axes: Sequence[str]) -> None:
        alone = tuple(axes) == (SEQUENCE,)  # a view, not one of the axes that multiply
        known = (*AXES, ENDS)
        twice = len(set(axes)) != len(axes) or {PIPE, ENDS} <= set(axes)
        if not alone and (twice or not set(axes) <= set(known)):
            stranger = next((axis for axis in axes if axis not in known), None)
            raise ConfigError(
                "mesh: axes",
                expected=f"different axes among {AXES}, with {ENDS!r} in place of {PIPE!r}, or {(SEQUENCE,)}",
                got=repr(tuple(axes)),
                do=did_you_mean(stranger, (*known, SEQUENCE), "Name each axis once."),
            )
        if ENDS in axes and ENDS not in self.shape.place(self.world.rank):
            raise ConfigError(
                f"mesh: {ENDS}",
                expected="a rank of the first or the last stage",
                got=f"rank {self.world.rank}, of stage {self.index((PIPE,))} of {self.shape.pipe}",
                do="Ask for it on ranks of these stages alone.",
            )


def count_axis_groups(axis: str, size: int, ranks: int, world: int) -> int:
    """Return the number of groups of ``size`` in ``ranks``, the ranks of ``world`` that other axes leave."""
    if isinstance(size, bool) or not isinstance(size, int) or size < 1 or ranks % size:
        whose = f"{ranks} ranks" if ranks == world else f"{ranks} ranks that the other axes leave of {world}"
        raise ConfigError(
            f"mesh: {axis}",
            expected=f"a positive divisor of the {whose}: {', '.join(map(str, divisors(ranks)))}",
            got=repr(size),
            do="Choose groups of equal size.",
        )
    return ranks // size


def _ranks_per_host(world: World, tensor: int, data: int) -> int:
    """Return the number of a host's ranks that read different data; ``data``: that number in each pod and stage."""
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
    return math.gcd(max(1, size // tensor), data)


def check_mesh(subject: str, mesh: object) -> None:
    """Raise a ConfigError unless ``mesh`` is a mesh."""
    if not isinstance(mesh, Mesh):
        do = "Pass what npuzero.mesh() returned."
        raise ConfigError(f"{subject}: mesh", expected="a npuzero.Mesh", got=describe_value(mesh), do=do)
