"""Snapshots of optimizer states: read at once, or later with the present values."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable

from torch import Tensor

#: Returns values, on any device; called once, by any thread.
Later = Callable[[], Tensor]


class KeptPart(ABC):
    """Represent a stored part that stays unchanged until it is released."""

    @abstractmethod
    def read(self) -> Tensor:
        """Return the part as stored; valid until another part is read."""

    @abstractmethod
    def release(self) -> None:
        """Release the part, which may then be overwritten; may be called again."""


class StateSnapshot:
    """Provide values for later reads: here without a copy, valid only if read before the next write."""

    def copied(self, values: Tensor) -> Later:
        """Return a function that later returns ``values``, which are in memory."""
        return lambda: values

    def kept(self, keep: Callable[[], KeptPart | None]) -> KeptPart | None:
        """Return a kept part for a later read; None: the caller reads it at once."""
        return None


#: Reads at once.
NOW = StateSnapshot()
