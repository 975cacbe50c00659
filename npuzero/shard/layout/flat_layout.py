"""Assign ranges of a flat buffer to parameters. Pure arithmetic."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

from npuzero.plan import SHARD_BYTES, START_ELEMENTS


@dataclass(frozen=True)
class FlatSlot:
    """Describe one parameter's range ``[begin, end)`` of a flat buffer, in elements."""

    name: str
    shape: torch.Size
    begin: int

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def end(self) -> int:
        return self.begin + self.numel


@dataclass(frozen=True)
class FlatLayout:
    """Hold the slots of a flat in order, the gaps between them, and the padded length.

    ``numel`` is a multiple of ``ranks * SHARD_BYTES / itemsize`` (the smallest itemsize that is sent). So for any axes
    that shard the buffer, all shards have equal length and aligned starts. With quantized communication it is also a
    multiple of ``ranks`` times the block size, so that the elements that share a scale do not depend on the axes.
    """

    slots: tuple[FlatSlot, ...]
    numel: int
    dtype: torch.dtype
    gaps: tuple[tuple[int, int], ...]

    @staticmethod
    def of(
        parameters: Iterable[tuple[str, torch.Size]],
        ranks: int,
        dtype: torch.dtype,
        wire: torch.dtype | None = None,
        start: int = START_ELEMENTS,
        shard: int = 1,
    ) -> FlatLayout:
        """Lay out parameters (name, shape) of one dtype for a world of ``ranks``.

        Args:
            wire: communication dtype of their gradients (None: ``dtype``).
            start: each parameter begins at a multiple of this many elements.
            shard: a power of 2; each shard, for any number of shards up to ``ranks``, is a multiple of it in elements.
        """
        slots: list[FlatSlot] = []
        end = 0
        for name, shape in parameters:
            slots.append(FlatSlot(name, shape, _round_up(end, start)))
            end = slots[-1].end
        itemsize = min(dtype.itemsize, (wire or dtype).itemsize)
        numel = _round_up(end, ranks * max(SHARD_BYTES // itemsize, shard))
        return FlatLayout(tuple(slots), numel, dtype, _find_gaps(slots, numel))

    def shard(self, index: int, count: int) -> tuple[int, int]:
        """Return the range of shard ``index`` of ``count``."""
        length = self.numel // count
        return index * length, (index + 1) * length


def intersect_ranges(a: tuple[int, int], b: tuple[int, int]) -> tuple[int, int]:
    """Return the intersection of two ranges; empty (begin == end) if they are disjoint."""
    begin = max(a[0], b[0])
    return begin, max(begin, min(a[1], b[1]))


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


def _find_gaps(slots: Sequence[FlatSlot], numel: int) -> tuple[tuple[int, int], ...]:
    ends = [0, *(slot.end for slot in slots)]
    begins = [*(slot.begin for slot in slots), numel]
    return tuple((end, begin) for end, begin in zip(ends, begins, strict=True) if begin > end)
