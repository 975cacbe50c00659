"""The memory of the host: pages of the process, pinned where an accelerator computes, so that copies run beside it."""

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
        beside: where the rank computes. On a CPU that is the same memory, and counted apart all the same.
        limit: bytes that may be held here; 0: as many as there are.
        reached: kernels of the device address what lies here.
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
        """Return a zeroed 1-D buffer that begins on a page, however small it is; as a source of :meth:`allocate`."""
        nbytes = numel * dtype.itemsize
        if self._pinned:  # wherever the device's allocator puts it
            return _align_to_page(self._zeros(nbytes + PAGE_BYTES, torch.uint8)).view(dtype)
        self.check_room(nbytes)
        return FileStore.aligned(nbytes).view(dtype)

    def check_room(self, nbytes: int) -> None:
        """Raise OutOfSpace where ``nbytes`` more are beyond the limit."""
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
    """Return so much of ``memory``, a page less, as begins on a page."""
    first = -memory.data_ptr() % PAGE_BYTES
    return memory[first : first + memory.numel() - PAGE_BYTES]
