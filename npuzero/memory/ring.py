"""A ring: a few equal buffers of the host that what is moved chunk by chunk goes through in turn."""

from __future__ import annotations

import torch
from torch import Tensor

from npuzero.memory.host import HostSpace
from npuzero.plan import round_up_pages


class BufferRing:
    """Hold ``slots`` buffers of ``nbytes`` each; what goes through the ring is in one of them at a time.

    Slots are whole pages, on page bounds, as a disk that is read past the page cache wants them. Whoever fills one
    again must know that nobody uses what it held.
    """

    def __init__(self, space: HostSpace, nbytes: int, slots: int) -> None:
        nbytes = round_up_pages(nbytes)
        self._slots = [space.allocate(nbytes, torch.uint8, "buffers", space.pages) for _ in range(slots)]

    def slot(self, turn: int) -> Tensor:
        """Return the buffer of the chunk number ``turn``, uint8."""
        return self._slots[turn % len(self._slots)]
