"""The interface of a kind of device: what the engine needs of it beyond torch, and what `npuzero info` shows."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

import torch


class Event(Protocol):
    """A point in a stream's work, as torch's event classes have it."""

    def record(self, stream: Any = None) -> None:
        """Marks the point the current (or given) stream has reached."""

    def wait(self, stream: Any = None) -> None:
        """Lets the current (or given) stream wait for the point; the host does not wait."""

    def query(self) -> bool:
        """Whether the point is reached."""

    def synchronize(self) -> None:
        """Lets the host wait for the point."""


@dataclass(frozen=True)
class Availability:
    """Whether devices of a kind can be used here; if not, `reason` says why and `do` what helps."""

    ok: bool
    reason: str = ""
    do: str = ""


@dataclass(frozen=True)
class MemoryFigures:
    """Bytes in use by this process now, at most since `reset_peak`, and of the device in all (None: unknown)."""

    allocated: int
    peak: int
    total: int | None


class Device(ABC):
    """One device of one kind. Made by `npuzero.device.get`; holds no resources."""

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
        """``"cpu"``, ``"cuda:0"``, ``"npu:3"``."""
        return str(self.device)

    @classmethod
    @abstractmethod
    def available(cls) -> Availability:
        """Whether devices of this kind can be used; starts none of them."""

    @classmethod
    @abstractmethod
    def count(cls) -> int:
        """How many there are."""

    @abstractmethod
    def capability(self) -> str:
        """What it is, in words: the model, its generation, its cores."""

    def facts(self) -> dict[str, Any]:
        """What a report tells of it, by name; ready for JSON. ``nominal_gbs``, where known: its memory's bandwidth."""
        return {"capability": self.capability(), "memory_bytes": self.memory().total}

    @abstractmethod
    def current_stream_int(self) -> int:
        """The current stream as an integer. Ask before every launch: it may change, and asking has effects on npu."""

    def check(self, tensors: Iterable[torch.Tensor]) -> None:
        """Whether the engine can rely on the device as it is set up, and on these tensors of a model on it.

        Raises:
            ConfigError: it cannot, saying why.
        """
        return

    @abstractmethod
    def make_event(self) -> Event:
        """A new event, not recorded yet; without timing."""

    def capturing(self) -> bool:
        """Whether what is issued on the current stream is being captured in a graph, and not run."""
        return False

    @abstractmethod
    def set_matmul(self, matmul: str) -> None:
        """Has this process compute float32 matrix products and convolutions so: ``"ieee"``, or ``"tf32"``.

        Raises:
            ConfigError: the device has no such mode.
        """

    @abstractmethod
    def synchronize(self) -> None:
        """The host waits for all work of the device."""

    @abstractmethod
    def memory(self) -> MemoryFigures:
        """Memory figures of this process."""

    @abstractmethod
    def reset_peak(self) -> bool:
        """Starts the peak figure anew; False where the system does not let us."""
