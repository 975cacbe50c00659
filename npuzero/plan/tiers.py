"""What rests farther away than the device: how much of a shard does."""

from __future__ import annotations

from npuzero.plan.placement import Placement
from npuzero.plan.precision import MOMENT_BLOCK


def near_numel(placement: Placement, numel: int) -> int:
    """Return how many elements of a shard of ``numel``, its first ones, rest on the device: whole blocks of moments."""
    if not placement.far:
        return numel
    return int((1.0 - placement.share) * numel) // MOMENT_BLOCK * MOMENT_BLOCK
