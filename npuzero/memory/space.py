"""A memory space: it allocates flat buffers and knows what they are for."""

from __future__ import annotations

from collections import Counter

import torch
from torch import Tensor

from npuzero.errors import OutOfSpace

LABELS = ("parameters", "gradients", "states", "buffers")


class Space:
    """Flat buffers on one device, counted by label.

    ``held[label]`` is what is allocated now, ``peak[label]`` its high water since :meth:`reset_peak`. Both count what
    was asked for, in bytes; an allocator's rounding comes on top.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.held: Counter[str] = Counter(dict.fromkeys(LABELS, 0))
        self.peak: Counter[str] = Counter(self.held)

    def allocate(self, numel: int, dtype: torch.dtype, label: str) -> Tensor:
        """A zeroed 1-D buffer of ``numel`` elements.

        Raises:
            OutOfSpace: the device cannot hold it.
        """
        try:
            buffer = torch.zeros(numel, dtype=dtype, device=self.device)
        except RuntimeError as error:  # torch.OutOfMemoryError is one; the CPU allocator raises the plain kind
            raise self._out_of_space(label, numel * dtype.itemsize) from error
        self.count(label, buffer.nbytes)
        return buffer

    def resize(self, buffer: Tensor, nbytes: int, label: str) -> None:
        """Give ``buffer``'s storage ``nbytes`` (0 releases it); views of it stay views of it."""
        storage = buffer.untyped_storage()
        before = storage.nbytes()
        try:
            storage.resize_(nbytes)
        except RuntimeError as error:
            raise self._out_of_space(label, nbytes) from error
        self.count(label, nbytes - before)

    def count(self, label: str, nbytes: int) -> None:
        """Record that ``nbytes`` more (or, negative, fewer) are held for ``label``."""
        self.held[label] += nbytes
        self.peak[label] = max(self.peak[label], self.held[label])

    def reset_peak(self) -> None:
        self.peak = Counter(self.held)

    def _out_of_space(self, label: str, nbytes: int) -> OutOfSpace:
        return OutOfSpace(
            f"{self.device} memory for {label}",
            expected=f"room for {nbytes:,} bytes",
            got=f"an allocation failure with {sum(self.held.values()):,} bytes held by this model",
            do="Cut more of the state (a higher preset), use more ranks, or a smaller micro-batch.",
            nbytes=nbytes,
            held=dict(self.held),
        )
