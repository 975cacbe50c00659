"""Durations of products, element-wise work and updates: shared by the engine's clock and that of published systems."""

from __future__ import annotations

import torch

from npuzero.plan import Axes, MeshShape, Plan, Precision
from npuzero.planner.hardware.cluster import Cluster, DeviceSpec
from npuzero.planner.hardware.network import find_group_placement

_FP32 = torch.float32.itemsize


def products_s(device: DeviceSpec, flops: float, dtype: str, tokens: float) -> float:
    """Return the seconds of matrix products over ``tokens`` tokens: FLOPs over the FLOPs per second in training.

    If measured, a constant cost per pass (:attr:`DevicePace.ramp_tokens`) is added.

    Raises:
        ConfigError: the device's peak in this dtype is unknown.
    """
    return flops / device.flops_per_s(dtype) * (1.0 + device.pace(dtype).ramp_tokens / tokens)


def elementwise_s(device: DeviceSpec, nbytes: float, dtype: str | None = None) -> float:
    """Return the seconds of memory-bound work that reads and writes ``nbytes`` in total.

    Args:
        dtype: dtype of a model's own element-wise work, which may also be compute-bound; None: streaming work.
    """
    return nbytes / (device.memory_bytes_per_s if dtype is None else device.pace(dtype).bytes_per_s)


def find_compute_dtype(plan: Plan) -> str:
    """Return the name of the dtype of matrix products under ``plan``."""
    names = {torch.bfloat16: "bf16", torch.float16: "fp16"}
    return names.get(plan.precision.parameter_of(torch.float32), "fp32")


def find_link_name(cluster: Cluster, mesh: MeshShape, axes: Axes) -> str:
    """Return the link between ranks along ``axes``: ``"local link"`` if all are on one node."""
    return "node link" if find_group_placement(cluster, mesh, axes).nodes > 1 else "local link"


def update_bytes(precision: Precision, parameter: torch.dtype, moments: int = 2, clip: bool = True) -> float:
    """Return the bytes that an update of one element reads and writes.

    The float32 gradient is read once, and again for the norm if it is clipped; masters and moments are read and
    written; the parameter is written, and also read if it is its own master, or the upper half of one.
    """
    moment = precision.moment_bytes(1024) / 1024
    own = 1 if precision.keeps_fp32_masters(parameter) else 2
    return _FP32 * (1 + clip) + 2 * (precision.master_bytes(parameter) + moments * moment) + own * parameter.itemsize
