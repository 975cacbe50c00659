"""A lane: where several steps run one after another beside the caller, each step once the one before it is done.

On the host a lane is a thread; on an accelerator it is a stream, so that the current stream waits only at ``wait()``.
"""

from __future__ import annotations

import queue
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

import torch

from npuzero.comm import fork
from npuzero.comm.board import SLICE_S, LaneThread, Watch
from npuzero.comm.communicator import Handle


class Lane(ABC):
    """Runs steps in order."""

    @abstractmethod
    def run(self, step: Callable[[], None]) -> Handle:
        """Queues ``step``; what it raises, the handle's ``wait()`` raises."""

    @abstractmethod
    def close(self, timeout_s: float) -> None:
        """Waits for queued steps, at most ``timeout_s``."""


def make_lane(device: torch.device, name: str) -> Lane:
    """The lane that suits ``device``."""
    return HostLane(name) if device.type == "cpu" else StreamLane(device)


class HostHandle(Handle):
    """A step on a HostLane; ``watch`` makes the watch of who waits for it long, where the step meets other ranks."""

    def __init__(self, watch: Callable[[], Watch] | None) -> None:
        self.event = threading.Event()
        self.error: BaseException | None = None
        self._watch = watch

    def wait(self) -> None:
        if not self.event.wait(SLICE_S):
            self._wait_long()
        if self.error is not None:
            raise self.error

    def _wait_long(self) -> None:
        if self._watch is None:
            self.event.wait()
            return
        with self._watch() as watch:
            while not self.event.wait(SLICE_S):
                failure = watch.look()
                if failure is not None:
                    raise failure.error(watch.subject)

    def done(self) -> bool:
        return self.event.is_set()


class HostLane(Lane):
    """A thread that takes steps from a queue; it starts with the first."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._steps: queue.SimpleQueue[tuple[Callable[[], None], HostHandle] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._birthplace = fork.Birthplace()

    def run(self, step: Callable[[], None], watch: Callable[[], Watch] | None = None) -> Handle:
        self._birthplace.check(self._name)
        if self._thread is None:
            # A daemon: a step that waits for a dead peer must not keep the interpreter from ending.
            self._thread = LaneThread(target=self._work, name=f"npuzero-{self._name}", daemon=True)
            self._thread.start()
        handle = HostHandle(watch)
        self._steps.put((step, handle))
        return handle

    def close(self, timeout_s: float) -> None:
        if self._thread is not None:
            self._steps.put(None)
            self._thread.join(timeout_s)

    def _work(self) -> None:
        while (item := self._steps.get()) is not None:
            step, handle = item
            try:
                with torch.no_grad():
                    step()
            except BaseException as error:
                handle.error = error
            del step, item  # the tensors a step holds are the caller's again
            handle.event.set()


class StreamHandle(Handle):
    """A step on a StreamLane; keeps what the step returned until the current stream waits for it."""

    def __init__(self, module: Any, event: Any, step: Callable[[], None]) -> None:
        self._module = module
        self._event = event
        self._step: Callable[[], None] | None = step

    def wait(self) -> None:
        self._event.wait(self._module.current_stream())
        self._step = None

    def done(self) -> bool:
        return bool(self._event.query())


class StreamLane(Lane):
    """A stream of the device beside the current one."""

    def __init__(self, device: torch.device) -> None:
        self._module: Any = getattr(torch, device.type)
        self._stream = self._module.Stream(device)

    def run(self, step: Callable[[], None]) -> Handle:
        self._stream.wait_stream(self._module.current_stream())
        with self._module.stream(self._stream), torch.no_grad():
            step()
            event = self._module.Event()
            event.record(self._stream)
        return StreamHandle(self._module, event, step)

    def close(self, timeout_s: float) -> None:
        return
