"""Wrap the results of calls: npuzero's handles as torch's Work, and the reverse."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from npuzero.comm.torch_backend.tensors import NAME, After
from npuzero.device import AsyncHandle, HostLane
from npuzero.errors import CollectiveError


class ShmWork(dist.Work):
    """Represent pending operations; the first wait also runs the functions that complete them."""

    def __init__(
        self, lane: HostLane, handles: Sequence[AsyncHandle], afters: Sequence[After], result: list[Tensor]
    ) -> None:
        super().__init__()
        self._lane = lane
        self._handles = handles
        self._afters = afters
        self._result = result
        self._finishing = threading.Lock()
        self._finished = False
        self._error: BaseException | None = None
        self._future: Any = None

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:  # torch: 0 means the group's limit only
        deadline_s = time.monotonic() + timeout.total_seconds()
        while timeout and not self.is_completed():
            if time.monotonic() > deadline_s:
                raise CollectiveError(
                    f"wait on {NAME}",
                    expected=f"every rank within {timeout.total_seconds()} s",
                    got="an operation that is not done",
                    do="See what the other ranks do, or wait longer.",
                    kind="timeout",
                )
            time.sleep(0.001)
        self._finish()
        return True

    def is_completed(self) -> bool:
        if not all(handle.done() for handle in self._handles):
            return False
        self.exception()
        return True

    def is_success(self) -> bool:
        return self.is_completed() and self._error is None

    def exception(self) -> BaseException | None:
        """Wait for the end, and return the error of a failure."""
        try:
            self._finish()
        except CollectiveError as error:
            return error
        return None

    def result(self) -> list[Tensor]:
        return self._result

    def synchronize(self) -> None:
        self._finish()

    def get_future(self) -> Any:
        """Return a future of the tensors, completed on a thread of the group."""
        if self._future is None:
            self._future = torch.futures.Future()
            self._lane.run(self._complete_future)
        return self._future

    def _complete_future(self) -> None:
        error = self.exception()
        if error is None:
            self._future.set_result(self._result)
        else:
            self._future.set_exception(error)

    def _finish(self) -> None:
        with self._finishing:
            if not self._finished:
                try:
                    self._run_to_the_end()
                except CollectiveError as error:
                    self._error = error
                self._finished = True
        if self._error is not None:
            raise self._error

    def _run_to_the_end(self) -> None:
        for handle in self._handles:
            handle.wait()
        with torch.no_grad():
            for after in self._afters:
                after()


class WorkAsHandle(AsyncHandle):
    """Wrap a work as a handle, for works made of works."""

    def __init__(self, work: ShmWork) -> None:
        self._work = work

    def wait(self) -> None:
        self._work.wait()

    def done(self) -> bool:
        return self._work.is_completed()
