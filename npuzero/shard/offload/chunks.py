"""Divide the concatenated shards of many flat parameters into update chunks of about ``Settings.chunk_bytes``.

``Settings.chunk_bytes`` counts this rank's masters and moments. So offloaded states need buffers for a few chunks only,
and move while other chunks are updated. Chunks begin at multiples of MOMENT_BLOCK elements of a shard, so no block of
8-bit moments crosses a chunk. Every random bit belongs to an element. Therefore the division changes no result.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from npuzero.plan import divide_shards
from npuzero.shard.state.flat_parameter import FlatParameter


class ShardPiece(NamedTuple):
    """Identify the elements ``[begin, end)`` of this rank's states shard of a flat parameter."""

    flat: FlatParameter
    begin: int
    end: int


class UpdateChunk(NamedTuple):
    """Hold the pieces that are updated together: ``[begin, end)`` of the concatenation of all shards."""

    pieces: list[ShardPiece]
    begin: int
    end: int


def divide_into_chunks(
    shards: Sequence[ShardPiece], block_bytes: Callable[[FlatParameter], int], chunk_bytes: int
) -> Iterator[UpdateChunk]:
    """Divide shards, in the order of their units, into chunks.

    Args:
        block_bytes: returns the bytes of MOMENT_BLOCK elements of a flat's masters and moments.
        chunk_bytes: size of a chunk; 0: one chunk.
    """
    costs = ((begin, end, block_bytes(flat) if chunk_bytes else 0) for flat, begin, end in shards)
    end = 0
    for parts in divide_shards(costs, chunk_bytes):
        begin, end = end, end + sum(last - first for _, first, last in parts)
        yield UpdateChunk([ShardPiece(shards[i].flat, first, last) for i, first, last in parts], begin, end)
