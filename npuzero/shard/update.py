"""The update of a model as a stream of chunks: fetch, rule, store, start R4; one chunk where all of it is resident.

A chunk is so much of this rank's masters and moments as ``Settings.chunk_bytes`` says, so what lies in a farther memory
needs room for a few chunks only, and moves while others are updated. Chunks begin at multiples of MOMENT_BLOCK elements
of a shard, which no block of 8-bit moments crosses, and every random bit belongs to an element: so how shards are
divided moves no bit of any result.
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from npuzero.plan import MOMENT_BLOCK
from npuzero.shard.flat import Flat
from npuzero.shard.restore import Restorer
from npuzero.shard.unit import Unit


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


class Update:
    """Run the updates of one model, one after the other.

    Args:
        units: in forward order, in which R4 starts.
        chunk_bytes: of masters and moments in a chunk; 0: all in one.
        overlap: False ends each R4 at once.
    """

    def __init__(self, units: Sequence[Unit], restorer: Restorer, chunk_bytes: int, overlap: bool) -> None:
        self._units = units
        self._restorer = restorer
        self._chunk_bytes = chunk_bytes
        self._overlap = overlap
        self._waiting: deque[Unit] = deque()  # for their R4 to start, in order

    def begin(self) -> None:
        """Prepare for an optimizer that writes masters and parameters: every unit has an R4 to come."""
        self._waiting = deque(self._units)

    def chunks(self, flats: Sequence[Flat], block_bytes: Callable[[Flat], int]) -> Iterator[Chunk]:
        """Yield the shards of ``flats`` chunk by chunk; when the next one is asked for, the last one is updated.

        Args:
            flats: in order of their units.
            block_bytes: what MOMENT_BLOCK elements of a flat's masters and moments take.
        """
        chunks = list(_cut(flats, block_bytes, self._chunk_bytes))
        for i, chunk in enumerate(chunks):
            # Masters and moments rest where they are updated: from a farther memory they are fetched here ...
            yield chunk
            # ... and stored here, before the units that are done go on to R4.
            self._restore_until(chunks[i + 1].pieces[0].flat if i + 1 < len(chunks) else None)

    def end(self) -> None:
        """Start R4 of the units that still wait: nothing is written any more."""
        self._restore_until(None)

    def _restore_until(self, undone: Flat | None) -> None:
        """Start R4, in order, of the units before that of ``undone``."""
        while self._waiting and undone not in self._waiting[0].trainable:
            unit = self._waiting.popleft()
            self._restorer.start(unit)
            if not self._overlap:
                self._restorer.finish(unit)


def _cut(flats: Sequence[Flat], block_bytes: Callable[[Flat], int], chunk_bytes: int) -> Iterator[Chunk]:
    """Divide shards into chunks of as many blocks as fit, one at least; the last block of a shard may be shorter."""
    pieces: list[Piece] = []
    begin = end = 0  # of the chunk that is being filled, on the line
    room = chunk_bytes or sys.maxsize
    for flat in flats:
        cost, first, numel = block_bytes(flat) if chunk_bytes else 1, 0, flat.rests.states.numel
        while first < numel:
            if room < cost and pieces:
                yield Chunk(pieces, begin, end)
                pieces, begin, room = [], end, chunk_bytes
            blocks = min(max(room // cost, 1), -(-numel // MOMENT_BLOCK))
            last = min(first + blocks * MOMENT_BLOCK, numel)
            pieces.append(Piece(flat, first, last))
            end += last - first
            first, room = last, room - blocks * cost
    if pieces:
        yield Chunk(pieces, begin, end)
