"""Chunks: the shards of many flats, laid end to end and divided so that a chunk is about as large as the setting says.

A chunk is so much of this rank's masters and moments as ``Settings.chunk_bytes`` says, so what lies in a farther memory
needs room for a few chunks only, and moves while others are updated. Chunks begin at multiples of MOMENT_BLOCK elements
of a shard, which no block of 8-bit moments crosses, and every random bit belongs to an element: so how shards are
divided moves no bit of any result.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from npuzero.plan import divide_shards
from npuzero.shard.state.flat_parameter import FlatParameter


class ShardPiece(NamedTuple):
    """Name the elements ``[begin, end)`` of this rank's states shard of a flat."""

    flat: FlatParameter
    begin: int
    end: int


class UpdateChunk(NamedTuple):
    """Name pieces that are updated together: ``[begin, end)`` of the line, which is all shards laid end to end."""

    pieces: list[ShardPiece]
    begin: int
    end: int


def divide_into_chunks(
    shards: Sequence[ShardPiece], block_bytes: Callable[[FlatParameter], int], chunk_bytes: int
) -> Iterator[UpdateChunk]:
    """Divide shards, in order of their units, into chunks.

    Args:
        block_bytes: what MOMENT_BLOCK elements of a flat's masters and moments take.
        chunk_bytes: 0: all in one.
    """
    costs = ((begin, end, block_bytes(flat) if chunk_bytes else 0) for flat, begin, end in shards)
    end = 0
    for parts in divide_shards(costs, chunk_bytes):
        begin, end = end, end + sum(last - first for _, first, last in parts)
        yield UpdateChunk([ShardPiece(shards[i].flat, first, last) for i, first, last in parts], begin, end)
