"""Sizes of the mesh, and the bytes that a collective sends along each axis."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

from npuzero.arguments import check_count
from npuzero.plan.table.placement import AXES, DATA, ENDS, PIPE, SEQUENCE, Axes

#: Shards start and end on multiples of this: misaligned collectives are many times slower (pytorch#195450).
SHARD_BYTES = 512


@dataclass(frozen=True)
class MeshShape:
    """Hold the sizes of the axes of a mesh; their product is ``world``.

    Attributes:
        node, local: groups of data-parallel ranks, and the neighbouring ranks in each group.
        pod: groups of such groups; nothing is sharded over them unless a plan does so.
        tensor: neighbouring ranks that divide the layers of one model.
        pipe: stages of a pipeline.
        sequence: neighbouring ranks of the data axes that divide sequences; must divide the number of data ranks.

    Example::

        shape = npuzero.MeshShape(node=4, local=8, tensor=2)  # 64 ranks, 32 of them data-parallel
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
        """Return the number of data-parallel ranks."""
        return self.pod * self.node * self.local

    @property
    def ends(self) -> int:
        """Return the size of the ``ends`` axis: 2, or 1 without a pipeline."""
        return min(self.pipe, 2)

    def size(self, axes: Axes) -> int:
        """Return the number of shards of a tensor sharded over ``axes``."""
        known = self._known_sizes
        if axes not in known:
            known[axes] = math.prod(getattr(self, axis) for axis in axes)
        return known[axes]

    @cached_property
    def _known_sizes(self) -> dict[Axes, int]:
        """Keep the results of :meth:`size`: a prediction calls it some hundred thousand times."""
        return {}

    def sizes(self, axes: Axes) -> dict[str, int]:
        """Return the sizes of ``axes`` by name and in this order, without axes of one rank."""
        return {axis: size for axis in axes if (size := self.size((axis,))) > 1}

    def index(self, axes: Axes, rank: int) -> int:
        """Return the index of global rank ``rank``'s shard of a tensor sharded over ``axes``, outermost first."""
        place = self.place(rank)
        index = 0
        for axis in axes:
            index = index * getattr(self, axis) + place[axis]
        return index

    def place(self, rank: int) -> dict[str, int]:
        """Return the coordinates of a rank; ``ends`` is present only for ranks of the first and the last stage."""
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
        """Return the rank at ``place``, an index per axis of :data:`AXES`; ``ends``, if present, replaces ``pipe``."""
        if ENDS in place:
            place = {**place, PIPE: place[ENDS] * (self.pipe - 1)}
        rank = 0
        for axis in AXES:
            rank = rank * getattr(self, axis) + place[axis]
        return rank


def divisors(size: int) -> list[int]:
    """Return the positive divisors of ``size`` in ascending order."""
    low = [each for each in range(1, math.isqrt(size) + 1) if size % each == 0]
    return sorted({*low, *(size // each for each in low)})


#: Number of times a collective sends its buffer around the ring, less one rank's part.
_PASSES = {"all_gather": 1, "reduce_scatter": 1, "all_reduce": 2, "all_to_all": 1, "broadcast": 1, "barrier": 0}


def ring_bytes(verb: str, nbytes: int, size: int) -> int:
    """Return the bytes that each of ``size`` ranks sends in one collective on a ring (or another optimal algorithm).

    Args:
        verb: all_gather, reduce_scatter, all_reduce, all_to_all, broadcast, barrier, or send: the sender's bytes.
        nbytes: bytes of the unsharded buffer, size times the shard.
        size: ranks of the group.
    """
    if verb == "send":
        return nbytes
    return _PASSES[verb] * nbytes * (size - 1) // size


def axis_bytes(verb: str, nbytes: int, sizes: Mapping[str, int]) -> dict[str, int]:
    """Split the bytes of :func:`ring_bytes` by axis; axes that carry none are left out.

    A collective over several axes runs level by level: a gather over the inner axis first, a scatter over the outer.
    So the i-th of k axes carries nbytes * (s_i - 1) / (s_1 * ... * s_i), twice that for an all_reduce. Each number is a
    difference of two rounded ring totals, so that their sum is exactly the bytes of one ring over all ranks.

    Args:
        verb, nbytes: as for :func:`ring_bytes`.
        sizes: s_1 .. s_k by the names of the axes, outermost first, each more than 1. A send counts for the first.
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
