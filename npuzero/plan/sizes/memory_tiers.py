"""Offloaded parts of shards: their length, the chunks of their update, and the bytes of each chunk.

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

#: Default bytes of masters and moments per chunk of an offloaded update.
FAR_CHUNK_BYTES = 32 * 2**20
#: Chunks on the host at a time: one is written back, one is updated, one is read.
RING_SLOTS = 3
#: Units with parameters in transfer from NVMe to the device: one leaves the host, one is read into it.
READ_SLOTS = 2
#: Extents on a disk and slots of a ring are full pages, as direct I/O requires.
PAGE_BYTES = 4096
#: Each state of a piece starts on a multiple of this within its extent.
STATE_ALIGNMENT = 64


def device_shard_numel(placement: Placement, numel: int) -> int:
    """Return the elements at the start of a shard of ``numel`` that stay on the device: full blocks of moments."""
    if not placement.far:
        return numel
    return int((1.0 - placement.share) * numel) // MOMENT_BLOCK * MOMENT_BLOCK


def offloaded_block_bytes(precision: Precision, parameter: torch.dtype) -> int:
    """Return the bytes that MOMENT_BLOCK offloaded elements count for: masters or parameters, and two moments."""
    beside = 0 if precision.keeps_fp32_masters(parameter) else parameter.itemsize
    return MOMENT_BLOCK * (precision.master_bytes(parameter) + beside) + 2 * precision.moment_bytes(MOMENT_BLOCK)


class TierPart(NamedTuple):
    """Name the elements ``[begin, end)`` of shard number ``shard``."""

    shard: int
    begin: int
    end: int


def divide_shards(shards: Iterable[tuple[int, int, int]], chunk_bytes: int) -> Iterator[list[TierPart]]:
    """Divide the concatenation of shards into chunks of as many blocks as fit, at least one.

    Args:
        shards: for each its first element, its end, and the bytes that MOMENT_BLOCK of its elements count for.
        chunk_bytes: size of a chunk; 0: one chunk.
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
    """Hold the bytes of offloaded elements in each section of a host ring; the pieces of a chunk add up.

    Attributes:
        gradients: gradients stored on the device; gradients on the host are read in place.
        parameters: parameters stored on the device, which are updated, or rounded from float32 masters.
        masters, moments: those on NVMe; those on the host are updated in place.
    """

    gradients: int
    parameters: int
    masters: int
    moments: int


def ring_section_bytes(
    plan: Plan, parameter: torch.dtype, numel: int, moments: int, on_device: bool = False
) -> RingSections:
    """Return the bytes of ``numel`` offloaded elements of one shard, updated together, in each section.

    Args:
        parameter: dtype of the parameters.
        moments: moments per element.
        on_device: whether the device updates them, reading host memory directly.
    """
    precision, on_disk = plan.precision, plan.states.memory is Memory.NVME
    in_place = on_device or plan.lag > 0  # a delayed update has a copy of the parameters on the host
    return RingSections(
        gradients=0 if in_place or plan.gradients.far else numel * torch.float32.itemsize,
        parameters=0 if in_place or plan.parameters.far else numel * parameter.itemsize,
        masters=on_disk * _round_up_bytes(numel * precision.master_bytes(parameter), STATE_ALIGNMENT),
        moments=on_disk * moments * _round_up_bytes(precision.moment_bytes(numel), STATE_ALIGNMENT),
    )


def round_up_pages(nbytes: int) -> int:
    """Return ``nbytes`` rounded up to full pages."""
    return _round_up_bytes(nbytes, PAGE_BYTES)


def _round_up_bytes(nbytes: int, to: int) -> int:
    return -(-nbytes // to) * to
