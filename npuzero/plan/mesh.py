"""Sizes of the mesh, and what a collective over some of its axes sends."""

from __future__ import annotations

from dataclasses import dataclass

from npuzero.plan.placement import LOCAL, NODE, Axes

#: Shards start and end on multiples of this, since misaligned collectives are many times slower (pytorch#195450).
SHARD_BYTES = 512


@dataclass(frozen=True)
class MeshShape:
    """Give the sizes of the data axes. ``world`` ranks = ``node`` groups of ``local`` consecutive ranks."""

    node: int
    local: int

    @property
    def world(self) -> int:
        return self.node * self.local

    def size(self, axes: Axes) -> int:
        """Return the number of ranks that something sharded over ``axes`` is divided among."""
        size = 1
        for axis in axes:
            size *= self.node if axis == NODE else self.local
        return size

    def index(self, axes: Axes, rank: int) -> int:
        """Return which shard of something sharded over ``axes`` is global rank ``rank``'s:
        the first axis is outermost.
        """
        place = {NODE: rank // self.local, LOCAL: rank % self.local}
        index = 0
        for axis in axes:
            index = index * (self.node if axis == NODE else self.local) + place[axis]
        return index


def ring_bytes(verb: str, nbytes: int, size: int) -> int:
    """Return the bytes each of ``size`` ranks sends for one collective on a ring (or any algorithm that sends the
    fewest).

    Args:
        verb: all_gather, reduce_scatter, all_reduce, all_to_all, broadcast or barrier.
        nbytes: bytes of the unsharded buffer, size times the shard.
        size: ranks that take part.
    """
    factors = {"all_gather": 1, "reduce_scatter": 1, "all_reduce": 2, "all_to_all": 1, "broadcast": 1, "barrier": 0}
    return factors[verb] * nbytes * (size - 1) // size
