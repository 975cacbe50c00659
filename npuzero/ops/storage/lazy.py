"""Torch's lazy bits: a tensor may be marked as the negative, or the conjugate, of the values in its memory.

``z.conj()`` and ``z.conj().imag`` are such tensors, as are gradients derived from them. Code that reads the memory
directly sees other values than torch shows.
"""

from __future__ import annotations

from torch import Tensor


def is_lazy(tensor: Tensor) -> bool:
    """Return whether the values of ``tensor`` differ from those in its memory."""
    return tensor.is_neg() or tensor.is_conj()


def materialize_lazy(tensor: Tensor) -> Tensor:
    """Return ``tensor`` if it is contiguous and its memory holds its values; else a copy for which that holds."""
    if tensor.is_contiguous() and not tensor.is_neg() and not tensor.is_conj():
        return tensor
    return tensor.resolve_conj().resolve_neg().contiguous()
