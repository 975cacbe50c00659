"""Lanes: run steps in order, asynchronously to the caller.

On the host a lane is a thread; on an accelerator it is a stream, so that the current stream waits only at ``wait()``.
Transfers that overlap with computation run on a lane: a collective made of several, a copy between memories.

A lane has no notion of ranks. A caller with steps that communicate passes two functions: ``patience`` waits for a step,
and ``door`` raises if no step may be queued.
"""

from __future__ import annotations

import queue
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

import torch

from npuzero.device.handle import AsyncHandle

#: Wait until the event is set, or raise the reason why it never will be.
Patience = Callable[[threading.Event], object]


class WorkLane(ABC):
    """Run steps in order, each after the previous one is done."""

    @abstractmethod
    def run(self, step: Callable[[], None]) -> AsyncHandle:
        """Queue ``step``; the handle's ``wait()`` raises the error of the step."""

    @abstractmethod
    def close(self, timeout_s: float) -> None:
        """Wait for the queued steps, at most ``timeout_s``."""


class LaneThread(threading.Thread):
    """Run the steps of a lane. Only the threads that queued them wait."""


class HostHandle(AsyncHandle):
    """Represent a step on a :class:`HostLane`."""

    def __init__(self, patience: Patience) -> None:
        self.event = threading.Event()
        self.error: BaseException | None = None
        self._patience = patience

    def wait(self) -> None:
        if not self.event.is_set():
            self._patience(self.event)
        if self.error is not None:
            raise self.error

    def done(self) -> bool:
        return self.event.is_set()


class HostLane(WorkLane):
    """Run steps on a thread, which starts with the first step.

    Args:
        name: of the thread.
        door: called on the caller's thread before a step is queued; raises if no step may be queued.
    """

    def __init__(self, name: str, door: Callable[[], None] = lambda: None) -> None:
        self._name = name
        self._door = door
        self._steps: queue.SimpleQueue[tuple[Callable[[], None], HostHandle] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def run(self, step: Callable[[], None], patience: Patience = threading.Event.wait) -> AsyncHandle:
        """Queue ``step``; waiting for it calls ``patience``."""
        self._door()
        if self._thread is None:
            # A daemon, so that a step waiting for a dead peer does not block interpreter exit.
            self._thread = LaneThread(target=self._work, name=f"npuzero-{self._name}", daemon=True)
            self._thread.start()
        handle = HostHandle(patience)
        self._steps.put((step, handle))
        return handle

    def close(self, timeout_s: float) -> None:
        if self._thread is not None:
            self._steps.put(None)
            # Garbage is collected on any thread, so a finalizer may close the lane from the lane's thread.
            if self._thread is not threading.current_thread():
                self._thread.join(timeout_s)

    def _work(self) -> None:
        while (item := self._steps.get()) is not None:
            step, handle = item
            try:
                with torch.no_grad():
                    step()
            except BaseException as error:
                handle.error = error
            del step, item  # release the step's tensors before the caller continues
            handle.event.set()
            del handle  # its error's traceback refers to the frames of all waiting callers


class StreamHandle(AsyncHandle):
    """Represent a step on a StreamLane; keep it, and so its tensors, until the current stream waits for it."""

    def __init__(self, module: Any, event: Any, step: Callable[[], None]) -> None:
        self._module = module
        self._event = event
        self._step: Callable[[], None] | None = step

    def wait(self) -> None:
        self._event.wait(self._module.current_stream())
        self._step = None

    def done(self) -> bool:
        return bool(self._event.query())


class StreamLane(WorkLane):
    """Run steps on a separate stream of the device."""

    def __init__(self, device: torch.device) -> None:
        self._module: Any = getattr(torch, device.type)
        self._stream = self._module.Stream(device)

    def run(self, step: Callable[[], None]) -> AsyncHandle:
        self._stream.wait_stream(self._module.current_stream())
        with self._module.stream(self._stream), torch.no_grad():
            step()
            event = self._module.Event()
            event.record(self._stream)
        return StreamHandle(self._module, event, step)

    def close(self, timeout_s: float) -> None:
        return


def make_lane(device: torch.device, name: str, door: Callable[[], None] = lambda: None) -> WorkLane:
    """Return a lane for ``device``. ``door`` is for a :class:`HostLane`; a stream lane ignores it."""
    return HostLane(name, door) if device.type == "cpu" else StreamLane(device)
