"""How long things take, in a line each: both clocks, the engine's and that of published systems, ask here."""

from __future__ import annotations

import torch

from npuzero.plan import Axes, MeshShape, Plan, Precision
from npuzero.planner.hardware.cluster import Cluster, DeviceSpec
from npuzero.planner.hardware.network import find_group_placement

_FP32 = torch.float32.itemsize


def products_s(device: DeviceSpec, flops: float, dtype: str, tokens: float) -> float:
    """Return the seconds of matrix products over so many tokens: FLOPs over what the device sustains in training, and
    what it pays for few tokens as for many, where that was measured.

    Raises:
        ConfigError: the device's peak in this dtype is not known.
    """
    return flops / device.flops_per_s(dtype) * (1.0 + device.pace(dtype).ramp_tokens / tokens)


def elementwise_s(device: DeviceSpec, nbytes: float, dtype: str | None = None) -> float:
    """Return the seconds of work that is as long as its bytes, read and written, take.

    Args:
        dtype: of a model's own, which may compute as well; None: of what only streams.
    """
    return nbytes / (device.memory_bytes_per_s if dtype is None else device.pace(dtype).bytes_per_s)


def find_compute_dtype(plan: Plan) -> str:
    """Return by name the dtype that products are computed in under ``plan``."""
    names = {torch.bfloat16: "bf16", torch.float16: "fp16"}
    return names.get(plan.precision.parameter_of(torch.float32), "fp32")


def find_link_name(cluster: Cluster, mesh: MeshShape, axes: Axes) -> str:
    """Return over which link ranks along ``axes`` reach each other: ``"local link"`` where all are of one node."""
    return "node link" if find_group_placement(cluster, mesh, axes).nodes > 1 else "local link"


def update_bytes(precision: Precision, parameter: torch.dtype, moments: int = 2, clip: bool = True) -> float:
    """Return what an update of one element reads and writes.

    A gradient, float32, read once, and once more for the norm where it is clipped; masters and moments, read and
    written; the parameter written, and read too where it is its own master, or the upper half of one.
    """
    moment = precision.moment_bytes(1024) / 1024
    own = 1 if precision.keeps_fp32_masters(parameter) else 2
    return _FP32 * (1 + clip) + 2 * (precision.master_bytes(parameter) + moments * moment) + own * parameter.itemsize
