"""How states are read: at once, or later as they are now, whatever is written meanwhile."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable

from torch import Tensor

#: Gives values, on whatever device; asked once, by any thread.
Later = Callable[[], Tensor]


class KeptPart(ABC):
    """Stand for a stored part that stays as it is until it is released."""

    @abstractmethod
    def read(self) -> Tensor:
        """Return it as it is stored; it may be gone once another part is read."""

    @abstractmethod
    def release(self) -> None:
        """Let it be overwritten; may be called again."""


class StateSnapshot:
    """Say what becomes of what is read: here nothing, for who reads it before anything else is written."""

    def copied(self, values: Tensor) -> Later:
        """Return how to have ``values``, which lie in memory, later."""
        return lambda: values

    def kept(self, keep: Callable[[], KeptPart | None]) -> KeptPart | None:
        """Return what is to be read later of a part that can be kept where it is; None: it is read at once."""
        return None


#: Reads at once.
NOW = StateSnapshot()
