"""Handles: what asynchronous work is waited for by, whoever does it."""

from __future__ import annotations

from abc import ABC, abstractmethod


class Handle(ABC):
    """An operation under way: a collective, or steps on a lane."""

    @abstractmethod
    def wait(self) -> None:
        """Waits until the result is there (on an accelerator: has the current stream wait); any number of times.

        Raises:
            CollectiveError: a collective failed; its communicator is broken.
        """

    @abstractmethod
    def done(self) -> bool:
        """Tells whether ``wait()`` would return, or raise, at once."""


class Ready(Handle):
    """The handle of what was done within the call."""

    def wait(self) -> None:
        return

    def done(self) -> bool:
        return True
