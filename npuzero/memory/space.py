"""The interface of a memory space: it allocates buffers and counts, by label, what they are for.

Each memory that a plan can name (:class:`npuzero.plan.Memory`) has one space, with counts of its own; ``spaces.py``
says which. What is the same everywhere is here: counting, and errors that say what was held. What differs is where
zeros come from, and how a buffer's memory comes and goes.
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

#: Another provider of buffers: from numel and dtype to a zeroed tensor. Other ranks read a communicator's in place.
Source = Callable[[int, torch.dtype], Tensor]


class ReleasableBuffer(NamedTuple):
    """Stand for a buffer whose memory can be given back and taken again, while all views of it stay views.

    Attributes:
        label: what it is for.
        raw: its bytes, [n] uint8; not to be read or written while the memory is gone.
        give: gives the memory back; what is in it is lost.
        take: takes memory again, with anything in it; OutOfSpace where there is none.
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

    ``held[label]`` is what is allocated now, ``peak[label]`` its maximum since :meth:`reset_peak`. Both count the bytes
    that were asked for; an allocator's rounding comes on top. ``allocations`` counts the buffers made so far: a steady
    step makes none.

    Attributes:
        device: where torch says that its tensors are: not where the rank computes, which is ``world.device``.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.held: Counter[str] = Counter(dict.fromkeys(LABELS, 0))
        self.peak: Counter[str] = Counter(self.held)
        self.allocations = 0
        # What lives of all that it has made: buffers by id and label, since tensors do not hash by identity.
        self._buffers: weakref.WeakValueDictionary[tuple[int, str], Tensor] = weakref.WeakValueDictionary()
        self._transients: weakref.WeakSet[TransientBuffer] = weakref.WeakSet()

    @final
    def allocate(self, numel: int, dtype: torch.dtype, label: str, source: Source | None = None) -> Tensor:
        """Allocate a zeroed 1-D buffer of ``numel`` elements, from ``source`` if there is one.

        Raises:
            OutOfSpace: the memory cannot hold it.
        """
        nbytes = numel * dtype.itemsize
        try:
            buffer = (source or self._zeros)(numel, dtype)
        except (RuntimeError, OSError) as error:  # torch.OutOfMemoryError is a RuntimeError, as the CPU allocator's is
            raise self.out_of_space(label, nbytes) from error
        self.allocations += 1
        self.count(label, nbytes)
        self._buffers[id(buffer), label] = buffer
        return buffer

    @abstractmethod
    def transient(self, numel: int, dtype: torch.dtype, label: str) -> TransientBuffer:
        """Return a 1-D buffer of ``numel`` elements that has memory only between ``restore()`` and ``release()``.

        Meanwhile other transients of this space may have the memory.

        Raises:
            OutOfSpace: the address space is spent.
        """

    @final
    def count(self, label: str, nbytes: int) -> None:
        """Record that ``nbytes`` more (or, negative, fewer) are held for ``label``."""
        self.held[label] += nbytes
        self.peak[label] = max(self.peak[label], self.held[label])

    @final
    def reset_peak(self) -> None:
        """Restart the peak of each label at what is held now."""
        self.peak = Counter(self.held)

    @final
    def out_of_space(self, label: str, nbytes: int) -> OutOfSpace:
        """Return the error for an allocation of ``nbytes`` that failed, with what this space holds."""
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
        """Return a new zeroed 1-D buffer; raise a RuntimeError or OSError where there is no room."""


class TransientBuffer(ABC):
    """Hold a buffer whose memory comes and goes while its storage stays, so that views of it stay views.

    Attributes:
        tensor: [n]; not to be read or written while released; undefined after ``restore()``.
        here: whether it has memory. Released at first.
        label: what it is for.
    """

    tensor: Tensor

    def __init__(self, space: MemorySpace, nbytes: int, label: str) -> None:
        self._space = space
        self._nbytes = nbytes
        self.label = label
        self.here = False
        space._transients.add(self)

    def restore(self) -> None:
        """Take memory; do nothing if there is some.

        Raises:
            OutOfSpace: the device has none left.
        """
        if not self.here:
            try:
                self._restore()
            except RuntimeError as error:
                raise self._space.out_of_space(self.label, self._nbytes) from error
            self.here = True
            self._space.count(self.label, self._nbytes)

    def release(self) -> None:
        """Give the memory back; do nothing if there is none."""
        if self.here:
            self._release()
            self.here = False
            self._space.count(self.label, -self._nbytes)

    @abstractmethod
    def _restore(self) -> None: ...

    @abstractmethod
    def _release(self) -> None: ...
