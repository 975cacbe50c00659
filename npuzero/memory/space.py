"""A memory space: it allocates flat buffers and knows what they are for."""

from __future__ import annotations

import contextlib
import mmap
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable

import torch
from torch import Tensor

from npuzero import _native
from npuzero.errors import OutOfSpace

LABELS = ("parameters", "gradients", "states", "buffers")

#: Who else provides buffers: numel and dtype to a zeroed tensor. A communicator's are read by other ranks in place.
Source = Callable[[int, torch.dtype], Tensor]

# Host buffers from this size on have pages of their own instead of the heap's: they leave no holes in it, go back whole
# when they are freed, and may lie in huge pages.
_MAPPED_BYTES = 2**20


class Space:
    """Flat buffers on one device, counted by label.

    ``held[label]`` is what is allocated now, ``peak[label]`` its high water since :meth:`reset_peak`. Both count what
    was asked for, in bytes; an allocator's rounding comes on top. ``allocations`` counts buffers made so far: it stands
    still in a steady step.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.held: Counter[str] = Counter(dict.fromkeys(LABELS, 0))
        self.peak: Counter[str] = Counter(self.held)
        self.allocations = 0
        self.stock = _native.host.Stock()

    def allocate(self, numel: int, dtype: torch.dtype, label: str, source: Source | None = None) -> Tensor:
        """A zeroed 1-D buffer of ``numel`` elements, from ``source`` if there is one.

        Raises:
            OutOfSpace: the device cannot hold it.
        """
        nbytes = numel * dtype.itemsize
        try:
            buffer = zeros(numel, dtype, self.device) if source is None else source(numel, dtype)
        except (RuntimeError, OSError) as error:  # torch.OutOfMemoryError is a RuntimeError, as the CPU allocator's is
            raise self.out_of_space(label, nbytes) from error
        self.allocations += 1
        self.count(label, nbytes)
        return buffer

    def transient(self, numel: int, dtype: torch.dtype, label: str) -> Transient:
        """A 1-D buffer of ``numel`` elements that is there only between ``restore()`` and ``release()``.

        Meanwhile other transients of this space may have the memory; on an accelerator, all that torch allocates.

        Raises:
            OutOfSpace: the address space is spent.
        """
        if self.device.type == "cpu" and numel:
            return _PagedTransient(self, numel, dtype, label)
        return _StorageTransient(self, numel, dtype, label)

    def count(self, label: str, nbytes: int) -> None:
        """Record that ``nbytes`` more (or, negative, fewer) are held for ``label``."""
        self.held[label] += nbytes
        self.peak[label] = max(self.peak[label], self.held[label])

    def reset_peak(self) -> None:
        self.peak = Counter(self.held)

    def out_of_space(self, label: str, nbytes: int) -> OutOfSpace:
        return OutOfSpace(
            f"{self.device} memory for {label}",
            expected=f"room for {nbytes:,} bytes",
            got=f"an allocation failure with {sum(self.held.values()):,} bytes held by this model",
            do="Cut more of the state (a higher preset), use more ranks, or a smaller micro-batch.",
            nbytes=nbytes,
            held=dict(self.held),
        )


def zeros(numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """A zeroed 1-D buffer that nobody counts; on the host a large one goes back to the system when it is freed."""
    if device.type == "cpu" and numel * dtype.itemsize >= _MAPPED_BYTES:
        return torch.frombuffer(_mapped(numel * dtype.itemsize), dtype=dtype)
    return torch.zeros(numel, dtype=dtype, device=device)


class Transient(ABC):
    """A buffer whose memory comes and goes while its address, or at least its storage, stays: views of it stay views.

    Attributes:
        tensor: [n]; not to be read or written while released; undefined after ``restore()``.
        here: whether it has memory. Released at first.
    """

    tensor: Tensor

    def __init__(self, space: Space, nbytes: int, label: str) -> None:
        self._space = space
        self._nbytes = nbytes
        self._label = label
        self.here = False

    def restore(self) -> None:
        """Have memory; nothing happens if there is.

        Raises:
            OutOfSpace: the device has none left.
        """
        if not self.here:
            try:
                self._restore()
            except RuntimeError as error:
                raise self._space.out_of_space(self._label, self._nbytes) from error
            self.here = True
            self._space.count(self._label, self._nbytes)

    def release(self) -> None:
        """Give the memory back; nothing happens if there is none."""
        if self.here:
            self._release()
            self.here = False
            self._space.count(self._label, -self._nbytes)

    @abstractmethod
    def _restore(self) -> None: ...

    @abstractmethod
    def _release(self) -> None: ...


class _PagedTransient(Transient):
    """On the host: pages move in from a stock that the space's transients share, and back (csrc/host/pages.h)."""

    def __init__(self, space: Space, numel: int, dtype: torch.dtype, label: str) -> None:
        super().__init__(space, numel * dtype.itemsize, label)
        self._pages = _native.host.Pages(space.stock, self._nbytes)
        self.tensor = torch.frombuffer(self._pages, dtype=dtype)

    def _restore(self) -> None:
        self._pages.restore()

    def _release(self) -> None:
        self._pages.release()


class _StorageTransient(Transient):
    """On an accelerator: the storage is resized; the caching allocator has the memory meanwhile."""

    def __init__(self, space: Space, numel: int, dtype: torch.dtype, label: str) -> None:
        super().__init__(space, numel * dtype.itemsize, label)
        self.tensor = torch.empty(numel, dtype=dtype, device=space.device)
        self._release()

    def _restore(self) -> None:
        self.tensor.untyped_storage().resize_(self._nbytes)

    def _release(self) -> None:
        self.tensor.untyped_storage().resize_(0)


def _mapped(nbytes: int) -> mmap.mmap:
    pages = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError):  # advice: kernels built without huge pages refuse it
        pages.madvise(mmap.MADV_HUGEPAGE)
    return pages
