"""How much memory a rank holds, counted the same way for every contender.

On the CPU: anonymous memory plus this process's share of shared memory (a page that n ranks map counts 1 / n on each).
Pages of files (libraries) are left out, since they belong to the machine's cache and not to training. The peak is the
kernel's high-water mark of the resident set, which `reset_peak_bytes` lowers to the present, less what does not count.
On an
accelerator: bytes of torch's allocator.
"""

from __future__ import annotations

import ctypes
import resource
from pathlib import Path
from typing import Any

import torch

_PROC = Path("/proc/self")


def reset_peak_bytes(device: torch.device) -> bool:
    """Gives free memory back and starts the peak anew; False where the system does not let us."""
    if device.type != "cpu":
        _device_module(device).reset_peak_memory_stats()
        return True
    ctypes.CDLL(None).malloc_trim(0)  # glibc keeps what was freed, and would count it
    try:
        (_PROC / "clear_refs").write_text("5")  # proc(5): resets VmHWM
    except OSError:
        return False
    return True


def current_resident_bytes(device: torch.device) -> int:
    """What this rank holds."""
    if device.type == "cpu":
        share = _read_proc_fields("smaps_rollup")
        return share["Pss_Anon"] + share["Pss_Shmem"]
    return int(_device_module(device).memory_allocated())


def peak_resident_bytes(device: torch.device) -> int:
    """The most that this rank has held since `reset_peak_bytes`."""
    if device.type == "cpu":
        status, share = _read_proc_fields("status"), _read_proc_fields("smaps_rollup")
        return status["VmHWM"] - status["RssFile"] - (status["RssShmem"] - share["Pss_Shmem"])
    return int(_device_module(device).max_memory_allocated())


def shared_resident_bytes(device: torch.device) -> int:
    """This rank's share of memory that ranks share; part of `current_resident_bytes`."""
    return _read_proc_fields("smaps_rollup")["Pss_Shmem"] if device.type == "cpu" else 0


def page_faults() -> int:
    """Pages this process has touched for the first time, or again after giving them back."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt


def disk_bytes() -> dict[str, int]:
    """Bytes that this process has had read from disks and written to them; what a cache had does not count."""
    lines = (line.split(": ") for line in (_PROC / "io").read_text().splitlines())
    found = {name: int(value) for name, value in lines}
    return {"read": found["read_bytes"], "written": found["write_bytes"]}


def _device_module(device: torch.device) -> Any:
    return getattr(torch, device.type)


def _read_proc_fields(name: str) -> dict[str, int]:
    """The fields of a file of /proc/self that are given in kB, in bytes."""
    lines = (line.split() for line in (_PROC / name).read_text().splitlines())
    return {words[0].rstrip(":"): int(words[1]) * 1024 for words in lines if words[-1] == "kB"}
