"""A ring of equal host buffers, used in turn for data that moves by chunk."""

from __future__ import annotations

import torch
from torch import Tensor

from npuzero.memory.host import HostSpace
from npuzero.plan import round_up_pages


class BufferRing:
    """Hold ``slots`` buffers of ``nbytes`` each, one per chunk in flight.

    Slots start on a page and are a multiple of a page, as reads that bypass the page cache require. Before a slot is
    refilled the caller must know that its old contents are unused.
    """

    def __init__(self, space: HostSpace, nbytes: int, slots: int) -> None:
        nbytes = round_up_pages(nbytes)
        self._slots = [space.allocate(nbytes, torch.uint8, "buffers", space.pages) for _ in range(slots)]

    def slot(self, turn: int) -> Tensor:
        """Return the buffer for chunk number ``turn``, uint8."""
        return self._slots[turn % len(self._slots)]
