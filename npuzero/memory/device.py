"""Allocate memory of the computing device: torch's allocator on an accelerator, pages of the process on the CPU."""

from __future__ import annotations

import contextlib
import mmap
from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor

from npuzero import _native
from npuzero import device as devices
from npuzero.memory.space import MemorySpace, ReleasableBuffer, TransientBuffer, view_as_bytes

# Host buffers of this size or more are mapped separately from the heap: they leave no holes in it, all their memory
# returns to the system when they are freed, and they may use huge pages.
_MAPPED_BYTES = 2**20


class DeviceSpace(MemorySpace):
    """Allocate buffers on the device where the rank computes.

    Memory of a released transient buffer is reused by other transient buffers of this space; on an accelerator by any
    allocation of torch.
    """

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self.stock = _native.host.Stock()

    def transient(self, numel: int, dtype: torch.dtype, label: str) -> TransientBuffer:
        if self.device.type == "cpu" and numel:
            return _PagedTransient(self, numel, dtype, label)
        return _StorageTransient(self, numel, dtype, label)

    def blocks(self) -> Iterator[ReleasableBuffer]:
        """Yield the buffers of this space that have memory now."""
        for (_, label), buffer in list(self._buffers.items()):
            if buffer.numel():
                raw, nbytes = view_as_bytes(buffer), buffer.untyped_storage().nbytes()
                yield ReleasableBuffer(
                    label, raw, partial(self._give, label, raw), partial(self._take, label, raw, nbytes)
                )
        for transient in list(self._transients):
            if transient.here and transient.tensor.numel():
                yield ReleasableBuffer(
                    transient.label, view_as_bytes(transient.tensor), transient.release, transient.restore
                )

    def _give(self, label: str, raw: Tensor) -> None:
        """Release the memory of a buffer: on the CPU its address stays, on an accelerator its storage object."""
        if self.device.type == "cpu":
            _native.host.vacate(raw.data_ptr(), raw.nbytes)
        else:
            raw.untyped_storage().resize_(0)
        self.count(label, -raw.nbytes)

    def _take(self, label: str, raw: Tensor, storage_bytes: int) -> None:
        if self.device.type != "cpu":  # on the CPU, memory returns with the first access
            try:
                raw.untyped_storage().resize_(storage_bytes)
            except RuntimeError as error:
                raise self.out_of_space(label, raw.nbytes) from error
        self.count(label, raw.nbytes)

    def trim(self) -> None:
        """Release cached memory to the device or the system."""
        self.stock.trim()
        devices.get(self.device).trim()

    def _zeros(self, numel: int, dtype: torch.dtype) -> Tensor:
        return allocate_zeros(numel, dtype, self.device)


def allocate_zeros(numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return a zeroed 1-D buffer that no space counts. A large one on the host returns to the system when freed."""
    if device.type == "cpu" and numel * dtype.itemsize >= _MAPPED_BYTES:
        return torch.frombuffer(_map_memory(numel * dtype.itemsize), dtype=dtype)
    return torch.zeros(numel, dtype=dtype, device=device)


class _PagedTransient(TransientBuffer):
    """Hold a transient buffer on the host; its pages come from a stock of the space (csrc/host/pages.h)."""

    def __init__(self, space: DeviceSpace, numel: int, dtype: torch.dtype, label: str) -> None:
        super().__init__(space, numel * dtype.itemsize, label)
        self._pages = _native.host.Pages(space.stock, self._nbytes)
        self.tensor = torch.frombuffer(self._pages, dtype=dtype)

    def _restore(self) -> None:
        self._pages.restore()

    def _release(self) -> None:
        self._pages.release()


class _StorageTransient(TransientBuffer):
    """Hold a transient buffer on an accelerator; its storage is resized, through torch's caching allocator."""

    def __init__(self, space: DeviceSpace, numel: int, dtype: torch.dtype, label: str) -> None:
        super().__init__(space, numel * dtype.itemsize, label)
        self.tensor = torch.empty(numel, dtype=dtype, device=space.device)
        self._release()

    def _restore(self) -> None:
        self.tensor.untyped_storage().resize_(self._nbytes)

    def _release(self) -> None:
        self.tensor.untyped_storage().resize_(0)


def _map_memory(nbytes: int) -> mmap.mmap:
    pages = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError):  # only advice; kernels built without huge pages refuse it
        pages.madvise(mmap.MADV_HUGEPAGE)
    return pages
