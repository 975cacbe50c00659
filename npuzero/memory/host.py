"""Allocate host memory: pages of the process, pinned if an accelerator computes, so that copies overlap with it."""

from __future__ import annotations

import torch
from torch import Tensor

from npuzero import device as devices
from npuzero.errors import OutOfSpace
from npuzero.memory.device import DeviceSpace, allocate_zeros
from npuzero.memory.file import FileStore
from npuzero.plan import PAGE_BYTES, round_up_pages


class HostSpace(DeviceSpace):
    """Allocate buffers in the host's memory.

    Args:
        beside: the device where the rank computes. A CPU uses the same memory, but the host space counts separately.
        limit: maximum bytes to hold; 0: no limit.
        reached: kernels of the device access this memory in place.
    """

    def __init__(self, beside: torch.device, limit: int = 0, reached: bool = False) -> None:
        super().__init__(torch.device("cpu"))
        self._beside = beside
        self._pinned = beside.type != "cpu"
        self._limit = limit
        self._reached = reached

    def _zeros(self, numel: int, dtype: torch.dtype) -> Tensor:
        self.check_room(numel * dtype.itemsize)
        if self._pinned and self._reached and numel:
            memory = _align_to_page(
                torch.zeros(round_up_pages(numel * dtype.itemsize) + PAGE_BYTES, dtype=torch.uint8, pin_memory=True)
            )
            devices.get(self._beside).open_host(memory)
            return memory[: numel * dtype.itemsize].view(dtype)
        if self._pinned and numel:
            return torch.zeros(numel, dtype=dtype, pin_memory=True)
        return allocate_zeros(numel, dtype, self.device)

    def pages(self, numel: int, dtype: torch.dtype) -> Tensor:
        """Return a zeroed 1-D buffer of any size that begins on a page; a source for :meth:`allocate`."""
        nbytes = numel * dtype.itemsize
        if self._pinned:  # the device's allocator does not align to pages
            return _align_to_page(self._zeros(nbytes + PAGE_BYTES, torch.uint8)).view(dtype)
        self.check_room(nbytes)
        return FileStore.aligned(nbytes).view(dtype)

    def check_room(self, nbytes: int) -> None:
        """Raise OutOfSpace if ``nbytes`` more would exceed the limit."""
        held = sum(self.held.values())
        if self._limit and held + nbytes > self._limit:
            raise OutOfSpace(
                "memory of the host",
                expected=f"room for {nbytes:,} bytes",
                got=f"{held:,} bytes held of the {self._limit:,} that settings.host_bytes allows",
                do="Allow more, let states rest in files (offload='nvme'), or divide them into smaller chunks.",
                nbytes=nbytes,
                held=dict(self.held),
            )


def _align_to_page(memory: Tensor) -> Tensor:
    """Return the part of ``memory`` that begins on a page and is one page shorter."""
    first = -memory.data_ptr() % PAGE_BYTES
    return memory[first : first + memory.numel() - PAGE_BYTES]
