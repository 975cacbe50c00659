"""Memory of a rank, measured in the same way for every contender.

On the CPU: anonymous memory plus this process's share of shared memory (a page mapped by n ranks counts 1 / n on each).
File pages (libraries) are excluded: they belong to the machine's cache, not to training. The peak is the kernel's
high-water mark of the resident set, reset by `reset_peak_bytes`, minus the excluded pages. On an accelerator: bytes of
torch's allocator.
"""

from __future__ import annotations

import ctypes
import resource
from pathlib import Path
from typing import Any

import torch

_PROC = Path("/proc/self")


def reset_peak_bytes(device: torch.device) -> bool:
    """Return free memory to the system and reset the peak; False if the system does not allow it."""
    if device.type != "cpu":
        _device_module(device).reset_peak_memory_stats()
        return True
    ctypes.CDLL(None).malloc_trim(0)  # glibc retains freed memory, which would count
    try:
        (_PROC / "clear_refs").write_text("5")  # proc(5): resets VmHWM
    except OSError:
        return False
    return True


def current_resident_bytes(device: torch.device) -> int:
    """Return the current memory of this rank."""
    if device.type == "cpu":
        share = _read_proc_fields("smaps_rollup")
        return share["Pss_Anon"] + share["Pss_Shmem"]
    return int(_device_module(device).memory_allocated())


def peak_resident_bytes(device: torch.device) -> int:
    """Return the peak memory of this rank since `reset_peak_bytes`."""
    if device.type == "cpu":
        status, share = _read_proc_fields("status"), _read_proc_fields("smaps_rollup")
        return status["VmHWM"] - status["RssFile"] - (status["RssShmem"] - share["Pss_Shmem"])
    return int(_device_module(device).max_memory_allocated())


def shared_resident_bytes(device: torch.device) -> int:
    """Return this rank's share of memory shared by ranks; part of `current_resident_bytes`."""
    return _read_proc_fields("smaps_rollup")["Pss_Shmem"] if device.type == "cpu" else 0


def page_faults() -> int:
    """Return pages that this process touched for the first time, or again after releasing them."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt


def disk_bytes() -> dict[str, int]:
    """Return bytes read from and written to disks for this process; cache hits do not count."""
    lines = (line.split(": ") for line in (_PROC / "io").read_text().splitlines())
    found = {name: int(value) for name, value in lines}
    return {"read": found["read_bytes"], "written": found["write_bytes"]}


def _device_module(device: torch.device) -> Any:
    return getattr(torch, device.type)


def _read_proc_fields(name: str) -> dict[str, int]:
    """Return the fields in kB of a file in /proc/self, in bytes."""
    lines = (line.split() for line in (_PROC / name).read_text().splitlines())
    return {words[0].rstrip(":"): int(words[1]) * 1024 for words in lines if words[-1] == "kB"}
