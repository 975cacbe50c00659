"""Handles: wait for asynchronous work of any kind."""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Iterable


class AsyncHandle(ABC):
    """Represent work in flight: a collective, or a step on a lane."""

    @abstractmethod
    def wait(self) -> None:
        """Wait for the result (on an accelerator: make the current stream wait). May be called repeatedly.

        Raises:
            CollectiveError: a collective failed; its communicator is broken.
        """

    @abstractmethod
    def done(self) -> bool:
        """Return whether ``wait()`` would return, or raise, at once."""


class ReadyHandle(AsyncHandle):
    """Represent work that is already done."""

    def wait(self) -> None:
        return

    def done(self) -> bool:
        return True


def wait_quietly(handles: Iterable[AsyncHandle]) -> None:
    """Wait until all ``handles`` are done, and ignore their errors.

    For cleanup after an error: memory that pending work reads or writes must stay until the work is done.
    """
    for handle in handles:
        with contextlib.suppress(Exception):
            handle.wait()
