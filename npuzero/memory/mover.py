"""Copies between the device and the host: payload counted by link, beside the computation on an accelerator."""

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
    """Copy on behalf of one thread, in the order of the calls.

    On an accelerator copies run on a stream of their own, after what :meth:`follow` was called behind; ``wait()`` of a
    handle keeps the host until the copy has arrived, for the host reads what came, or may write again where it came
    from.

    Attributes:
        moved: bytes by link.
    """

    def __init__(self, device: torch.device) -> None:
        self.moved: Counter[str] = Counter()
        self._device = device
        self._module: Any = None if device.type == "cpu" else getattr(torch, device.type)
        self._stream = self._module and self._module.Stream(device)
        self._busy = False  # whether the stream was given work since the host last waited for it

    def to_host(self, target: Tensor, source: Tensor) -> AsyncHandle:
        """Copy ``source``, on the device, into ``target`` of the host; the source may be released at once."""
        self.moved[TO_HOST] += source.nbytes
        return self._copy(target, source, source)

    def to_device(self, target: Tensor, source: Tensor) -> AsyncHandle:
        """Copy ``source``, of the host, into ``target`` on the device."""
        self.moved[TO_DEVICE] += source.nbytes
        return self._copy(target, source, target)

    def attend(self) -> None:
        """Let the calling thread, which may be new, work with the device: a thread begins with another, or none."""
        if self._module is not None:
            self._module.set_device(self._device)

    def follow(self) -> None:
        """Let copies to come wait for what the calling thread's current stream has been given so far."""
        if self._stream is not None:
            self._stream.wait_stream(self._module.current_stream())

    def beside(self) -> AbstractContextManager[Any]:
        """Have what is launched inside run where copies do, in one order with them."""
        self._busy = True
        return nullcontext() if self._stream is None else self._module.stream(self._stream)

    def reach(self, memory: Tensor) -> Tensor:
        """Return a tensor of the device over memory of either kind."""
        return memory if memory.device == self._device else devices.get(self._device).reach(memory)

    def arrival(self) -> AsyncHandle:
        """Return a handle by which the current stream, not the host, waits for the copies so far."""
        if self._stream is None:
            return ReadyHandle()
        event = self._module.Event()
        event.record(self._stream)
        return _StreamArrival(event, self._module)

    def snapshot(self, value: Tensor) -> tuple[Tensor, AsyncHandle]:
        """Copy a few numbers to the host, whatever becomes of them on the device; they do not count."""
        taken = torch.empty(value.shape, dtype=value.dtype, pin_memory=self._stream is not None)
        return taken, self._copy(taken, value, value)

    def quiet(self) -> None:
        """Let the host wait for all copies so far.

        Where there were none since the last call the device is not asked: a stream that is being captured may not be.
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
    """Stand for a copy on a stream, for which the host waits."""

    def __init__(self, event: Any) -> None:
        self._event = event

    def wait(self) -> None:
        self._event.synchronize()

    def done(self) -> bool:
        return bool(self._event.query())


class _StreamArrival(_HostArrival):
    """Stand for copies on a stream, for which the current stream waits."""

    def __init__(self, event: Any, module: Any) -> None:
        super().__init__(event)
        self._module = module

    def wait(self) -> None:
        self._event.wait(self._module.current_stream())
