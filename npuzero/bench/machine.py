"""Description of the machine and software that figures were measured on."""

from __future__ import annotations

import os
import platform
import subprocess
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from npuzero import _native
from npuzero import device as devices

_SOURCES = Path(__file__).resolve().parents[2]


def machine_fingerprint(device: torch.device | str = "cpu") -> dict[str, Any]:
    """Return the facts of machine and software that figures depend on, ready for JSON, without paths or host names."""
    cpu = devices.get("cpu")
    return {
        "cpu": cpu.capability().partition(",")[0],
        "cores": len(os.sched_getaffinity(0)),
        "cache_bytes": _last_cache_bytes(),
        "memory_bytes": cpu.memory().total,
        "architecture": platform.machine(),
        "system": f"{platform.system()} {platform.release()}",
        "device": devices.get(device).capability(),
        "isa": _native.isa(),
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "npuzero": _npuzero_version(),
        "commit": _source_commit(),
        "load": round(os.getloadavg()[0], 2),
    }


def _npuzero_version() -> str | None:
    try:
        return metadata.version("npuzero")
    except metadata.PackageNotFoundError:  # run from its sources
        return None


def _last_cache_bytes() -> int | None:
    """Return the size of the last-level cache in bytes, if Linux reports it."""
    found = Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size")
    sizes = [int(path.read_text().strip().removesuffix("K")) * 1024 for path in found]
    return max(sizes, default=None)


def _source_commit() -> str | None:
    """Return the sources' commit, with ``+`` if they have changed since; None outside a checkout.

    Benchmark records and their pictures do not count as sources: measuring changes them.
    """
    if not (_SOURCES / ".git").exists():
        return None
    try:
        told = _run_git("rev-parse", "--short=12", "HEAD")
        changed = _run_git("status", "--porcelain", "--untracked-files=no", "--", ".", ":!benchmarks/results")
    except (OSError, subprocess.SubprocessError):
        return None
    return told + "+" * bool(changed)


def _run_git(*arguments: str) -> str:
    command = ["git", "-C", str(_SOURCES), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=20, check=True).stdout.strip()
