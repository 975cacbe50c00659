"""The memory of the host: pages of the process, pinned where an accelerator computes, so that copies run beside it."""

from __future__ import annotations

import torch
from torch import Tensor

from npuzero.memory.device import DeviceSpace, mapped, zeros


class HostSpace(DeviceSpace):
    """Allocate buffers in the host's memory.

    Args:
        beside: where the rank computes. On a CPU that is the same memory, and counted apart all the same.
    """

    def __init__(self, beside: torch.device) -> None:
        super().__init__(torch.device("cpu"))
        self._pinned = beside.type != "cpu"

    def _zeros(self, numel: int, dtype: torch.dtype) -> Tensor:
        if self._pinned and numel:
            return torch.zeros(numel, dtype=dtype, pin_memory=True)
        return zeros(numel, dtype, self.device)

    def pages(self, numel: int, dtype: torch.dtype) -> Tensor:
        """Return a zeroed 1-D buffer that begins on a page, however small it is; as a source of :meth:`allocate`."""
        if self._pinned or not numel:
            return self._zeros(numel, dtype)
        return torch.frombuffer(mapped(numel * dtype.itemsize), dtype=dtype)
