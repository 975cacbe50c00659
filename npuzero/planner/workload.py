"""What a model's units compute and keep in one pass, counted on meta."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class UnitWork:
    """Count one unit's work in the pass of one micro-batch on one rank.

    What lies within another unit (blocks in the root) counts for its own unit alone.

    Attributes:
        flops: of matrix products in forward; backward has twice as many.
        forward_bytes, backward_bytes: that element-wise work, norms and the like read and write.
        saved_bytes: that forward leaves for backward, parameters not counted, without recomputation.
        input_bytes: what recomputation leaves: its inputs.
        workspace_bytes: the most that lives within its forward or its backward beside what is saved.
        kernels: launches of forward.
    """

    flops: float
    forward_bytes: int
    backward_bytes: int
    saved_bytes: int
    input_bytes: int
    workspace_bytes: int
    kernels: int


@dataclass(frozen=True)
class Workload:
    """Count a model's work by unit, in the order of its units: the root first."""

    units: tuple[UnitWork, ...]
    micro_batch: int
    sequence: int
