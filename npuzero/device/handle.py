"""Handles: how a caller waits for asynchronous work, whatever does it."""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Iterable


class AsyncHandle(ABC):
    """Stand for work under way: a collective, or a step on a lane."""

    @abstractmethod
    def wait(self) -> None:
        """Wait for the result (on an accelerator: have the current stream wait); may be called any number of times.

        Raises:
            CollectiveError: a collective failed; its communicator is broken.
        """

    @abstractmethod
    def done(self) -> bool:
        """Return whether ``wait()`` would return, or raise, at once."""


class ReadyHandle(AsyncHandle):
    """Stand for work that was done within the call."""

    def wait(self) -> None:
        return

    def done(self) -> bool:
        return True


def wait_quietly(handles: Iterable[AsyncHandle]) -> None:
    """Wait until none of ``handles`` is under way, and ignore their errors.

    For cleanup after an error: memory that pending work reads or writes must stay until that work is over.
    """
    for handle in handles:
        with contextlib.suppress(Exception):
            handle.wait()
