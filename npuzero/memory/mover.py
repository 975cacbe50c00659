"""Copy between the device and the host, counted by link; copies overlap with computation on an accelerator."""

from __future__ import annotations

from collections import Counter
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from npuzero import device as devices
from npuzero.device import AsyncHandle, ReadyHandle
from npuzero.plan import TO_DEVICE, TO_HOST


class HostCopier:
    """Copy for one thread, in the order of the calls.

    On an accelerator copies run on a separate stream, after the work that :meth:`follow` waited for. ``wait()`` of a
    handle blocks the host until the copy is done, because the host then reads the target or rewrites the source.

    Attributes:
        moved: bytes by link.
    """

    def __init__(self, device: torch.device) -> None:
        self.moved: Counter[str] = Counter()
        self._device = device
        self._module: Any = None if device.type == "cpu" else getattr(torch, device.type)
        self._stream = self._module and self._module.Stream(device)
        self._busy = False  # whether the stream got work since the host last waited for it

    def to_host(self, target: Tensor, source: Tensor) -> AsyncHandle:
        """Copy ``source`` on the device into ``target`` on the host; the source may be released at once."""
        self.moved[TO_HOST] += source.nbytes
        return self._copy(target, source, source)

    def to_device(self, target: Tensor, source: Tensor) -> AsyncHandle:
        """Copy ``source`` on the host into ``target`` on the device."""
        self.moved[TO_DEVICE] += source.nbytes
        return self._copy(target, source, target)

    def attend(self) -> None:
        """Set the device of the calling thread: a new thread has another device, or none."""
        if self._module is not None:
            self._module.set_device(self._device)

    def follow(self) -> None:
        """Make later copies wait for the work issued so far on the calling thread's current stream."""
        if self._stream is not None:
            self._stream.wait_stream(self._module.current_stream())

    def beside(self) -> AbstractContextManager[Any]:
        """Run kernels launched in the block on the copy stream, in order with the copies."""
        self._busy = True
        return nullcontext() if self._stream is None else self._module.stream(self._stream)

    def reach(self, memory: Tensor) -> Tensor:
        """Return a device tensor over ``memory``, which is on the device or the host."""
        return memory if memory.device == self._device else devices.get(self._device).reach(memory)

    def arrival(self) -> AsyncHandle:
        """Return a handle for the copies so far; its ``wait()`` makes the current stream wait, not the host."""
        if self._stream is None:
            return ReadyHandle()
        event = self._module.Event()
        event.record(self._stream)
        return _StreamArrival(event, self._module)

    def snapshot(self, value: Tensor) -> tuple[Tensor, AsyncHandle]:
        """Copy a few numbers to the host; they may then change on the device. Not counted in ``moved``."""
        taken = torch.empty(value.shape, dtype=value.dtype, pin_memory=self._stream is not None)
        return taken, self._copy(taken, value, value)

    def quiet(self) -> None:
        """Wait on the host until all copies so far are done.

        Without copies since the last call it does not synchronize, which is not allowed while a stream is captured.
        """
        if self._stream is not None and self._busy:
            self._stream.synchronize()
        self._busy = False

    def _copy(self, target: Tensor, source: Tensor, on_device: Tensor) -> AsyncHandle:
        if self._stream is None:
            target.copy_(source)
            return ReadyHandle()
        with self.beside():
            target.copy_(source, non_blocking=True)
            event = self._module.Event()
            event.record(self._stream)
        if on_device.device.type != "cpu":
            on_device.record_stream(self._stream)
        return _HostArrival(event)


class _HostArrival(AsyncHandle):
    """Represent a copy on a stream; ``wait()`` blocks the host."""

    def __init__(self, event: Any) -> None:
        self._event = event

    def wait(self) -> None:
        self._event.synchronize()

    def done(self) -> bool:
        return bool(self._event.query())


class _StreamArrival(_HostArrival):
    """Represent copies on a stream; ``wait()`` makes the current stream wait."""

    def __init__(self, event: Any, module: Any) -> None:
        super().__init__(event)
        self._module = module

    def wait(self) -> None:
        self._event.wait(self._module.current_stream())
