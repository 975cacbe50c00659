"""The interface of a memory space: it allocates buffers and counts their bytes by label.

Each memory that a plan can name (:class:`npuzero.plan.Memory`) has one space with separate counts; ``spaces.py`` maps
them. Counting and out-of-space errors are here. Subclasses define how to allocate zeros, and how a transient buffer
gets and releases memory.
"""

from __future__ import annotations

import weakref
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable
from typing import NamedTuple, final

import torch
from torch import Tensor

from npuzero.errors import OutOfSpace

LABELS = ("parameters", "gradients", "states", "buffers")

#: An alternative allocator: (numel, dtype) to a zeroed tensor. Other ranks read a communicator's buffers in place.
Source = Callable[[int, torch.dtype], Tensor]


class ReleasableBuffer(NamedTuple):
    """Represent a buffer with memory that can be released and taken again, while all its views stay valid.

    Attributes:
        label: its part of the training state.
        raw: its bytes, [n] uint8; do not access while the memory is released.
        give: releases the memory; the contents are lost.
        take: takes memory again, with undefined contents; raises OutOfSpace if there is none.
    """

    label: str
    raw: Tensor
    give: Callable[[], None]
    take: Callable[[], None]


def view_as_bytes(tensor: Tensor) -> Tensor:
    """Return the bytes of a contiguous tensor."""
    return tensor.detach().reshape(-1).view(torch.uint8)


class MemorySpace(ABC):
    """Allocate flat buffers in one memory, and count them by label.

    ``held[label]`` is the bytes allocated now, ``peak[label]`` the maximum since :meth:`reset_peak`. Both count
    requested bytes, without an allocator's rounding. ``allocations`` counts the buffers made so far; a steady step
    makes none.

    Attributes:
        device: torch device of its tensors. The rank computes on ``world.device``, which may differ.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.held: Counter[str] = Counter(dict.fromkeys(LABELS, 0))
        self.peak: Counter[str] = Counter(self.held)
        self.allocations = 0
        # Live buffers of this space, by id and label; not in a WeakSet, since == of tensors is elementwise.
        self._buffers: weakref.WeakValueDictionary[tuple[int, str], Tensor] = weakref.WeakValueDictionary()
        self._transients: weakref.WeakSet[TransientBuffer] = weakref.WeakSet()

    @final
    def allocate(self, numel: int, dtype: torch.dtype, label: str, source: Source | None = None) -> Tensor:
        """Allocate a zeroed 1-D buffer of ``numel`` elements, from ``source`` if there is one.

        Raises:
            OutOfSpace: the memory has no room for it.
        """
        nbytes = numel * dtype.itemsize
        try:
            buffer = (source or self._zeros)(numel, dtype)
        except (RuntimeError, OSError) as error:  # torch.OutOfMemoryError and the CPU allocator's are RuntimeErrors
            raise self.out_of_space(label, nbytes) from error
        self.allocations += 1
        self.count(label, nbytes)
        self._buffers[id(buffer), label] = buffer
        return buffer

    @abstractmethod
    def transient(self, numel: int, dtype: torch.dtype, label: str) -> TransientBuffer:
        """Return a 1-D buffer of ``numel`` elements that has memory only between ``restore()`` and ``release()``.

        While it is released, other transient buffers of this space may use the memory.

        Raises:
            OutOfSpace: the address space is exhausted.
        """

    @final
    def count(self, label: str, nbytes: int) -> None:
        """Add ``nbytes`` (may be negative) to the bytes held for ``label``."""
        self.held[label] += nbytes
        self.peak[label] = max(self.peak[label], self.held[label])

    @final
    def reset_peak(self) -> None:
        """Reset the peak of each label to the bytes held now."""
        self.peak = Counter(self.held)

    @final
    def out_of_space(self, label: str, nbytes: int) -> OutOfSpace:
        """Return the error for a failed allocation of ``nbytes``, with the bytes that this space holds."""
        return OutOfSpace(
            f"{self.device} memory for {label}",
            expected=f"room for {nbytes:,} bytes",
            got=f"an allocation failure with {sum(self.held.values()):,} bytes held by this model",
            do="Shard more of the state (a higher preset), use more ranks, or a smaller micro-batch.",
            nbytes=nbytes,
            held=dict(self.held),
        )

    @abstractmethod
    def _zeros(self, numel: int, dtype: torch.dtype) -> Tensor:
        """Return a new zeroed 1-D buffer; raise a RuntimeError or OSError if there is no room."""


class TransientBuffer(ABC):
    """Hold a buffer that takes and releases memory while its storage stays, so that its views stay valid.

    Attributes:
        tensor: [n]; do not access while released; undefined after ``restore()``.
        here: whether it has memory. Initially released.
        label: its part of the training state.
    """

    tensor: Tensor

    def __init__(self, space: MemorySpace, nbytes: int, label: str) -> None:
        self._space = space
        self._nbytes = nbytes
        self.label = label
        self.here = False
        space._transients.add(self)

    def restore(self) -> None:
        """Take memory; do nothing if it has memory already.

        Raises:
            OutOfSpace: the device has no room.
        """
        if not self.here:
            try:
                self._restore()
            except RuntimeError as error:
                raise self._space.out_of_space(self.label, self._nbytes) from error
            self.here = True
            self._space.count(self.label, self._nbytes)

    def release(self) -> None:
        """Release the memory; do nothing if it has none."""
        if self.here:
            self._release()
            self.here = False
            self._space.count(self.label, -self._nbytes)

    @abstractmethod
    def _restore(self) -> None: ...

    @abstractmethod
    def _release(self) -> None: ...
