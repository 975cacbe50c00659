"""Chunks: the shards of many flats, laid end to end and divided so that a chunk is about as large as the setting says.

A chunk is so much of this rank's masters and moments as ``Settings.chunk_bytes`` says, so what lies in a farther memory
needs room for a few chunks only, and moves while others are updated. Chunks begin at multiples of MOMENT_BLOCK elements
of a shard, which no block of 8-bit moments crosses, and every random bit belongs to an element: so how shards are
divided moves no bit of any result.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

from npuzero.plan import MOMENT_BLOCK
from npuzero.shard.flat import Flat


class Piece(NamedTuple):
    """Name the elements ``[begin, end)`` of this rank's states shard of a flat."""

    flat: Flat
    begin: int
    end: int


class Chunk(NamedTuple):
    """Name pieces that are updated together: ``[begin, end)`` of the line, which is all shards laid end to end."""

    pieces: list[Piece]
    begin: int
    end: int


def divide(shards: Iterable[Piece], block_bytes: Callable[[Flat], int], chunk_bytes: int) -> Iterator[Chunk]:
    """Divide shards into chunks of as many blocks as fit, one at least; the last block of a shard may be shorter.

    Args:
        shards: what is to be divided, in order of the units.
        block_bytes: what MOMENT_BLOCK elements of a flat's masters and moments take.
        chunk_bytes: 0: all in one.
    """
    pieces: list[Piece] = []
    begin = end = 0  # of the chunk that is being filled, on the line
    room = chunk_bytes or sys.maxsize
    for flat, first, numel in shards:
        cost = block_bytes(flat) if chunk_bytes else 1
        while first < numel:
            if room < cost and pieces:
                yield Chunk(pieces, begin, end)
                pieces, begin, room = [], end, chunk_bytes
            blocks = min(max(room // cost, 1), -(-(numel - first) // MOMENT_BLOCK))
            last = min(first + blocks * MOMENT_BLOCK, numel)
            pieces.append(Piece(flat, first, last))
            end += last - first
            first, room = last, room - blocks * cost
    if pieces:
        yield Chunk(pieces, begin, end)
