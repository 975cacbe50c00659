"""Track background users of a world, for example asynchronous saves; the end of the world waits for them."""

from __future__ import annotations

import weakref
from typing import Protocol


class BackgroundUser(Protocol):
    """Use a world in a background thread, as an asynchronous save does."""

    def end(self) -> None:
        """Wait until no work is in progress, and raise its error if it was not raised before."""


class BackgroundUsers:
    """Hold weak references to the background users of one world."""

    def __init__(self) -> None:
        self._known: weakref.WeakSet[BackgroundUser] = weakref.WeakSet()

    def add(self, companion: BackgroundUser) -> None:
        """Make the end of the world wait for ``companion``."""
        self._known.add(companion)

    def end(self) -> None:
        """Wait for all, and raise the first error that was not raised before."""
        for companion in list(self._known):
            companion.end()

    def forget(self) -> None:
        """Wait for none: the world is broken, and their work fails."""
        self._known.clear()
