"""The CPU: one stream, synchronous work; memory is the resident set of the process."""

from __future__ import annotations

import os
import platform
from pathlib import Path
from typing import Any

import torch

from npuzero.device.device import Availability, Device, Event, MemoryFigures
from npuzero.errors import ConfigError

_STATUS = Path("/proc/self/status")
_CLEAR = Path("/proc/self/clear_refs")
_CPUINFO = Path("/proc/cpuinfo")


class DoneEvent:
    """Represent an event of a synchronous device: work is done when its call returns."""

    def record(self, stream: Any = None) -> None:
        """Do nothing: there is nothing to mark."""

    def wait(self, stream: Any = None) -> None:
        """Do nothing: the work is done."""

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        """Do nothing: the work is done."""


class Cpu(Device):
    kind = "cpu"
    backend = "gloo"

    @classmethod
    def available(cls) -> Availability:
        return Availability(True)

    @classmethod
    def count(cls) -> int:
        return 1

    def capability(self) -> str:
        return f"{_processor_name()}, {len(_usable_cores())} cores for this process, {torch.get_num_threads()} threads"

    def current_stream_int(self) -> int:
        return 0

    def reach(self, memory: torch.Tensor) -> torch.Tensor:
        """Return ``memory`` itself."""
        return memory

    def make_event(self) -> Event:
        return DoneEvent()

    def set_matmul(self, matmul: str) -> None:
        """Refuse tf32: oneDNN has a mode of that name, which most processors silently ignore."""
        if matmul != "ieee":
            raise ConfigError(
                "precision.matmul on cpu",
                expected="'ieee': a CPU has no such units, and its results would say nothing about a device that has",
                got=repr(matmul),
                do="Leave it out on the CPU; train with it on cuda (TF32) or npu (HF32).",
            )

    def synchronize(self) -> None:
        """Do nothing: the work is done."""

    def memory(self) -> MemoryFigures:
        """Return the resident set of the process. Ranks that are threads share it."""
        page_bytes = os.sysconf("SC_PAGE_SIZE")
        figures = _status_bytes()
        return MemoryFigures(figures["VmRSS"], figures["VmHWM"], os.sysconf("SC_PHYS_PAGES") * page_bytes)

    def trim(self) -> None:
        """Do nothing: torch keeps nothing here."""

    def reset_peak(self) -> bool:
        try:
            _CLEAR.write_text("5")  # proc(5): resets VmHWM
        except OSError:
            return False
        return True


def _usable_cores() -> set[int]:
    return os.sched_getaffinity(0)


def _processor_name() -> str:
    """Return the processor's name from Linux; the architecture if Linux has none (often on aarch64)."""
    for line in _CPUINFO.read_text(encoding="utf-8").splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


def _status_bytes() -> dict[str, int]:
    lines = (line.split() for line in _STATUS.read_text(encoding="utf-8").splitlines())
    return {words[0].rstrip(":"): int(words[1]) * 1024 for words in lines if words[-1] == "kB"}
