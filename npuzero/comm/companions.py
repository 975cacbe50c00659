"""Companions: work beside the main thread that uses a world, and that the end of the world waits for."""

from __future__ import annotations

import weakref
from typing import Protocol


class BackgroundUser(Protocol):
    """Use a world in a thread beside the main one, as an asynchronous save does."""

    def end(self) -> None:
        """Wait until nothing is under way, and raise what went wrong and nobody has heard."""


class BackgroundUsers:
    """Know the companions of one world, as long as anybody holds them."""

    def __init__(self) -> None:
        self._known: weakref.WeakSet[BackgroundUser] = weakref.WeakSet()

    def add(self, companion: BackgroundUser) -> None:
        """Have the end of the world wait for ``companion``."""
        self._known.add(companion)

    def end(self) -> None:
        """Wait for all, and raise the first error that nobody has heard."""
        for companion in list(self._known):
            companion.end()

    def forget(self) -> None:
        """Wait for none: the world is broken, and so is what they do."""
        self._known.clear()
