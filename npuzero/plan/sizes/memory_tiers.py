"""What rests farther away than the device: how much of a shard does, in which chunks it is updated, what each takes.

The engine and the prediction call the same functions, so that they agree to the byte.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from typing import NamedTuple

import torch

from npuzero.plan.presets import Plan
from npuzero.plan.table.placement import Memory, Placement
from npuzero.plan.table.precision import MOMENT_BLOCK, Precision

#: Bytes of masters and moments in a chunk of what is far, where no setting says it.
FAR_CHUNK_BYTES = 32 * 2**20
#: Chunks that are on the host at a time: one goes, one is updated, one comes.
RING_SLOTS = 3
#: Units whose parameters are on their way from NVMe to the device: one leaves the host, one comes there.
READ_SLOTS = 2
#: Extents on a disk, and slots of a ring, are whole pages, as files that are read past the page cache want them.
PAGE_BYTES = 4096
#: Each state of a piece begins on a multiple of this within its extent.
STATE_ALIGNMENT = 64


def device_shard_numel(placement: Placement, numel: int) -> int:
    """Return how many elements of a shard of ``numel``, its first ones, rest on the device: whole blocks of moments."""
    if not placement.far:
        return numel
    return int((1.0 - placement.share) * numel) // MOMENT_BLOCK * MOMENT_BLOCK


def offloaded_block_bytes(precision: Precision, parameter: torch.dtype) -> int:
    """Return what MOMENT_BLOCK elements of far masters and two moments count for, by which far shards are divided."""
    beside = 0 if precision.keeps_fp32_masters(parameter) else parameter.itemsize
    return MOMENT_BLOCK * (precision.master_bytes(parameter) + beside) + 2 * precision.moment_bytes(MOMENT_BLOCK)


class TierPart(NamedTuple):
    """Name the elements ``[begin, end)`` of the shard number ``shard``."""

    shard: int
    begin: int
    end: int


def divide_shards(shards: Iterable[tuple[int, int, int]], chunk_bytes: int) -> Iterator[list[TierPart]]:
    """Divide shards, laid end to end, into chunks of as many blocks as fit, one at least.

    Args:
        shards: of each its first element, the end, and what MOMENT_BLOCK elements of it count for.
        chunk_bytes: 0: all in one.
    """
    parts: list[TierPart] = []
    room = limit = chunk_bytes or sys.maxsize
    for index, (first, numel, block_bytes) in enumerate(shards):
        cost = block_bytes if chunk_bytes else 1
        while first < numel:
            if room < cost and parts:
                yield parts
                parts, room = [], limit
            # The last block of a shard may be shorter.
            blocks = min(max(room // cost, 1), -(-(numel - first) // MOMENT_BLOCK))
            last = min(first + blocks * MOMENT_BLOCK, numel)
            parts.append(TierPart(index, first, last))
            first, room = last, room - blocks * cost
    if parts:
        yield parts


class RingSections(NamedTuple):
    """Give the bytes of far elements on their way through the host, by section of a ring; those of a chunk add up.

    Attributes:
        gradients: that rest on the device; others are read where they are.
        parameters: that rest on the device, which are updated, or rounded from float32 masters.
        masters, moments: those on NVMe; others are updated where they are.
    """

    gradients: int
    parameters: int
    masters: int
    moments: int


def ring_section_bytes(
    plan: Plan, parameter: torch.dtype, numel: int, moments: int, on_device: bool = False
) -> RingSections:
    """Return what ``numel`` far elements of one flat's shard, updated together, take in each section.

    Args:
        parameter: dtype of the flat.
        moments: of an element.
        on_device: the device updates, and reads the host's memory itself.
    """
    precision, on_disk = plan.precision, plan.states.memory is Memory.NVME
    in_place = on_device or plan.lag > 0  # a delayed update has parameters of its own on the host
    return RingSections(
        gradients=0 if in_place or plan.gradients.far else numel * torch.float32.itemsize,
        parameters=0 if in_place or plan.parameters.far else numel * parameter.itemsize,
        masters=on_disk * _round_up_bytes(numel * precision.master_bytes(parameter), STATE_ALIGNMENT),
        moments=on_disk * moments * _round_up_bytes(precision.moment_bytes(numel), STATE_ALIGNMENT),
    )


def round_up_pages(nbytes: int) -> int:
    """Return ``nbytes``, rounded up to whole pages."""
    return _round_up_bytes(nbytes, PAGE_BYTES)


def _round_up_bytes(nbytes: int, to: int) -> int:
    return -(-nbytes // to) * to
