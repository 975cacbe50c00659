"""The interface of a kind of device: the functions that the engine and ``npuzero info`` need beyond torch."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

import torch


class Event(Protocol):
    """Mark a point in a stream's work, as torch's event classes do."""

    def record(self, stream: Any = None) -> None:
        """Mark the point that the current (or given) stream has reached."""

    def wait(self, stream: Any = None) -> None:
        """Make the current (or given) stream wait for the point; the host does not wait."""

    def query(self) -> bool:
        """Return whether the point is reached."""

    def synchronize(self) -> None:
        """Wait on the host until the point is reached."""


@dataclass(frozen=True)
class Availability:
    """Describe whether devices of a kind can be used here; if not, the ``reason`` and the remedy (``do``)."""

    ok: bool
    reason: str = ""
    do: str = ""


@dataclass(frozen=True)
class MemoryFigures:
    """Hold the bytes this process uses now, its peak since `reset_peak`, and the device's total (None: unknown)."""

    allocated: int
    peak: int
    total: int | None


class Device(ABC):
    """Describe one device of one kind. Made by `npuzero.device.get`; holds no resources."""

    #: torch's device type, and the key of its kernels.
    kind: ClassVar[str]
    #: the torch.distributed backend of the kind.
    backend: ClassVar[str]
    #: whether a captured graph with our ops can be replayed.
    replays: ClassVar[bool] = True

    def __init__(self, device: torch.device) -> None:
        self.device = device

    @property
    def name(self) -> str:
        """Return the device's name: ``"cpu"``, ``"cuda:0"``, ``"npu:3"``."""
        return str(self.device)

    @classmethod
    @abstractmethod
    def available(cls) -> Availability:
        """Return whether devices of this kind can be used, without initializing one."""

    @classmethod
    @abstractmethod
    def count(cls) -> int:
        """Return the number of devices of this kind."""

    @abstractmethod
    def capability(self) -> str:
        """Describe the device in words: its model, generation and cores."""

    def facts(self) -> dict[str, Any]:
        """Return facts about the device for reports; ``nominal_gbs``, if known, is its memory bandwidth in GB/s."""
        return {"capability": self.capability(), "memory_bytes": self.memory().total}

    @abstractmethod
    def current_stream_int(self) -> int:
        """Return the current stream as an integer. Call it before every launch: on npu the call has side effects."""

    def check(self, tensors: Iterable[torch.Tensor]) -> None:
        """Check that the engine supports the device's settings and these tensors of a model.

        Raises:
            ConfigError: a setting or a tensor is not supported; the error has the reason.
        """
        return

    def check_reach(self) -> None:
        """Check that kernels of the device can address host memory.

        Raises:
            ConfigError: kernels cannot; the error has the reason.
        """
        return

    def open_host(self, memory: torch.Tensor) -> None:
        """Register ``memory`` (pinned, a multiple of a page) for kernels of the device, until its storage is freed.

        Raises:
            ConfigError: the device refuses.
        """
        return

    @abstractmethod
    def reach(self, memory: torch.Tensor) -> torch.Tensor:
        """Return a device tensor, for kernels, over a 1-D part of memory registered by :meth:`open_host`.

        The caller must keep the memory alive.
        """

    @abstractmethod
    def make_event(self) -> Event:
        """Return a new event without timing, not recorded yet."""

    def capturing(self) -> bool:
        """Return whether the current stream is being captured into a graph."""
        return False

    @abstractmethod
    def set_matmul(self, matmul: str) -> None:
        """Set how this process computes float32 matrix products and convolutions: ``"ieee"`` or ``"tf32"``.

        Raises:
            ConfigError: the device has no such mode.
        """

    @abstractmethod
    def synchronize(self) -> None:
        """Wait on the host until all work of the device is done."""

    @abstractmethod
    def memory(self) -> MemoryFigures:
        """Return the memory figures of this process."""

    @abstractmethod
    def trim(self) -> None:
        """Release the memory that torch's allocator caches."""

    @abstractmethod
    def reset_peak(self) -> bool:
        """Reset the peak figure; return False if the system does not allow it."""
