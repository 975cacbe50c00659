"""Checks before any measurement: the device, its kernel library, and whether the kernels run at all."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from npuzero import _native, cann, ops
from npuzero import device as devices
from npuzero.bench.checks.check_ops import CheckFinding
from npuzero.config import find_toolkit
from npuzero.device import kernels
from npuzero.errors import NpuZeroError


def kernel_library() -> dict[str, Any]:
    """Describe the npu kernels in use: library file, architecture, and the build method of the installed CANN."""
    path, toolkit = Path(_native.npu_library()), find_toolkit("cann")
    facts: dict[str, Any] = {"why_none": kernels.why_no_library()}
    if path.is_file():
        digest = hashlib.sha256(path.read_bytes()).hexdigest()
        facts = {"path": str(path), "sha256": digest, "architecture": cann.ARCHITECTURE}
    if toolkit:
        facts |= {"cann": toolkit.version, "way": cann.get_build_method(toolkit.root, toolkit.version)}
    return facts


def check_setup(device: torch.device) -> Iterator[CheckFinding]:
    """Check the device's settings and a first use of its kernels. All other checks depend on both."""
    settings, first_use = CheckFinding("settings of the device"), CheckFinding("first use of the kernels")
    try:
        devices.get(device).check([])
        settings.count(None)
    except (NpuZeroError, RuntimeError) as error:
        settings.count(f"{type(error).__name__}: {error}")
    yield settings
    source, target = torch.arange(8.0), torch.zeros(8, dtype=torch.bfloat16)
    there = target.to(device)
    try:
        ops.cast(source.to(device), there)
        first_use.count(None if torch.equal(there.cpu().float(), source) else f"cast gave {there.cpu().tolist()}")
    except (NpuZeroError, RuntimeError) as error:
        first_use.count(f"{type(error).__name__}: {error}")
    yield first_use
