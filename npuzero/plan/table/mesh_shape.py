"""Sizes of the mesh, and what a collective over some of its axes sends."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

from npuzero.arguments import check_count
from npuzero.plan.table.placement import AXES, DATA, ENDS, PIPE, SEQUENCE, Axes

#: Shards start and end on multiples of this, since misaligned collectives are many times slower (pytorch#195450).
SHARD_BYTES = 512


@dataclass(frozen=True)
class MeshShape:
    """Give the sizes of the axes of a mesh; they multiply to ``world``.

    Attributes:
        node, local: groups of ranks with data of their own, and the ranks in each, which are near each other.
        pod: groups of such groups; nothing is sharded over them unless a plan says so.
        tensor: neighbouring ranks that divide the layers of one model.
        pipe: stages of a pipeline.
        sequence: neighbouring ranks of the data axes that divide sequences; a divisor of their number.

    Example::

        shape = npuzero.MeshShape(node=4, local=8, tensor=2)  # 64 ranks, 32 of them with data of their own
        report = npuzero.predict(net, "zero3", shape)
    """

    node: int
    local: int
    pod: int = 1
    tensor: int = 1
    pipe: int = 1
    sequence: int = 1

    def __post_init__(self) -> None:
        for axis in AXES:
            check_count(f"MeshShape.{axis}", getattr(self, axis), "Give the number of ranks along the axis.")

    @property
    def world(self) -> int:
        return math.prod(getattr(self, axis) for axis in AXES)

    @property
    def data(self) -> int:
        """Return the number of ranks with data of their own."""
        return self.pod * self.node * self.local

    @property
    def ends(self) -> int:
        """Return the number of stages that are the first or the last."""
        return min(self.pipe, 2)

    def size(self, axes: Axes) -> int:
        """Return the number of ranks that something sharded over ``axes`` is divided among."""
        known = self._known_sizes
        if axes not in known:
            known[axes] = math.prod(getattr(self, axis) for axis in axes)
        return known[axes]

    @cached_property
    def _known_sizes(self) -> dict[Axes, int]:
        """Hold what :meth:`size` has worked out: a prediction asks some hundred thousand times."""
        return {}

    def sizes(self, axes: Axes) -> dict[str, int]:
        """Return the size of each of ``axes`` that has several ranks, by name and in this order."""
        return {axis: size for axis in axes if (size := self.size((axis,))) > 1}

    def index(self, axes: Axes, rank: int) -> int:
        """Return which shard of something sharded over ``axes`` is global rank ``rank``'s:
        the first axis is outermost.
        """
        place = self.place(rank)
        index = 0
        for axis in axes:
            index = index * getattr(self, axis) + place[axis]
        return index

    def place(self, rank: int) -> dict[str, int]:
        """Return the index of a rank along each axis; along ``ends`` that of a rank at either end alone."""
        place: dict[str, int] = {}
        for axis in reversed(AXES):
            rank, place[axis] = divmod(rank, getattr(self, axis))
        data = 0
        for axis in DATA:
            data = data * getattr(self, axis) + place[axis]
        place[SEQUENCE] = data % self.sequence
        if place[PIPE] in (0, self.pipe - 1):
            place[ENDS] = min(place[PIPE], 1)
        return place

    def rank(self, place: dict[str, int]) -> int:
        """Return the rank at ``place``, an index for each of :data:`AXES`; along ``ends``, if there, for ``pipe``."""
        if ENDS in place:
            place = {**place, PIPE: place[ENDS] * (self.pipe - 1)}
        rank = 0
        for axis in AXES:
            rank = rank * getattr(self, axis) + place[axis]
        return rank


def divisors(size: int) -> list[int]:
    """Return the positive divisors of ``size`` in ascending order: the numbers of ranks that divide it."""
    low = [each for each in range(1, math.isqrt(size) + 1) if size % each == 0]
    return sorted({*low, *(size // each for each in low)})


#: How often a collective sends its buffer around the ring, less one rank's part.
_PASSES = {"all_gather": 1, "reduce_scatter": 1, "all_reduce": 2, "all_to_all": 1, "broadcast": 1, "barrier": 0}


def ring_bytes(verb: str, nbytes: int, size: int) -> int:
    """Return the bytes each of ``size`` ranks sends for one collective on a ring (or any algorithm that sends the
    fewest).

    Args:
        verb: all_gather, reduce_scatter, all_reduce, all_to_all, broadcast, barrier, or send: there the sender's bytes.
        nbytes: bytes of the unsharded buffer, size times the shard.
        size: ranks that take part; of a send, ranks of the group.
    """
    if verb == "send":
        return nbytes
    return _PASSES[verb] * nbytes * (size - 1) // size


def axis_bytes(verb: str, nbytes: int, sizes: Mapping[str, int]) -> dict[str, int]:
    """Return of the bytes that :func:`ring_bytes` says how many go along each axis; axes without any are left out.

    A collective over several axes goes level by level: a gather over the inner axis first, a scatter over the outer.
    So along the i-th of k axes goes nbytes * (s_i - 1) / (s_1 * ... * s_i), and twice that for an all_reduce. Each is
    rounded to what the axes up to it send more than those outside of it, so that together they are what one ring
    over all ranks sends.

    Args:
        verb, nbytes: as for :func:`ring_bytes`.
        sizes: s_1 .. s_k by the names of the axes, outermost first, each more than 1. What goes to one rank, a send,
            counts for the first.
    """
    along: dict[str, int] = {}
    ranks, outside = 1, 0
    for axis, size in sizes.items():
        ranks *= size
        within = ring_bytes(verb, nbytes, ranks)
        if within > outside:
            along[axis] = within - outside
        outside = within
    return along
