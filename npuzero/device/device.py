"""The interface of a kind of device: what the engine and ``npuzero info`` need of it beyond torch."""

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
        """Let the current (or given) stream wait for the point; the host does not wait."""

    def query(self) -> bool:
        """Return whether the point is reached."""

    def synchronize(self) -> None:
        """Let the host wait for the point."""


@dataclass(frozen=True)
class Availability:
    """Say whether devices of a kind can be used here; if not, ``reason`` says why and ``do`` what helps."""

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

    #: torch's word for the kind, and the key of its kernels.
    kind: ClassVar[str]
    #: the torch.distributed backend that serves it.
    backend: ClassVar[str]
    #: whether ops may be in a graph that is captured, and replayed.
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
        """Return whether devices of this kind can be used; starts none of them."""

    @classmethod
    @abstractmethod
    def count(cls) -> int:
        """Return the number of devices of this kind."""

    @abstractmethod
    def capability(self) -> str:
        """Describe the device in words: its model, generation and cores."""

    def facts(self) -> dict[str, Any]:
        """Return what a report tells of the device; ``nominal_gbs`` is its memory's bandwidth, where that is known."""
        return {"capability": self.capability(), "memory_bytes": self.memory().total}

    @abstractmethod
    def current_stream_int(self) -> int:
        """Return the current stream as an integer. Ask before every launch: asking has effects on npu."""

    def check(self, tensors: Iterable[torch.Tensor]) -> None:
        """Check that the engine can rely on the device's settings, and on these tensors of a model on it.

        Raises:
            ConfigError: it cannot, saying why.
        """
        return

    def check_reach(self) -> None:
        """Check that kernels of the device can address the host's memory.

        Raises:
            ConfigError: they cannot, saying why.
        """
        return

    def open_host(self, memory: torch.Tensor) -> None:
        """Let kernels of the device address ``memory``: pinned, whole pages; until its storage is freed.

        Raises:
            ConfigError: the device refuses.
        """
        return

    @abstractmethod
    def reach(self, memory: torch.Tensor) -> torch.Tensor:
        """Return a tensor of the device, for its kernels, over a 1-D part of what :meth:`open_host` was told of; it is
        the caller's to keep that alive.
        """

    @abstractmethod
    def make_event(self) -> Event:
        """Return a new event, not recorded yet, without timing."""

    def capturing(self) -> bool:
        """Return whether work issued on the current stream is being captured in a graph instead of run."""
        return False

    @abstractmethod
    def set_matmul(self, matmul: str) -> None:
        """Set how this process computes float32 matrix products and convolutions: ``"ieee"`` or ``"tf32"``.

        Raises:
            ConfigError: the device has no such mode.
        """

    @abstractmethod
    def synchronize(self) -> None:
        """Let the host wait for all work of the device."""

    @abstractmethod
    def memory(self) -> MemoryFigures:
        """Return the memory figures of this process."""

    @abstractmethod
    def trim(self) -> None:
        """Give back what torch's allocator keeps for tensors to come."""

    @abstractmethod
    def reset_peak(self) -> bool:
        """Restart the peak figure; return False where the system does not allow it."""
