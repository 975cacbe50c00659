"""torch's lazy bits: a tensor may say that its values are the negatives, or the conjugates, of what its memory holds.

``z.conj()`` and ``z.conj().imag`` are such tensors, and so are gradients that come by them. Who reads memory itself
sees other values than torch shows.
"""

from __future__ import annotations

from torch import Tensor


def is_lazy(tensor: Tensor) -> bool:
    """Tell whether the values of ``tensor`` are not those in its memory."""
    return tensor.is_neg() or tensor.is_conj()


def materialize_lazy(tensor: Tensor) -> Tensor:
    """Return ``tensor`` where it is contiguous and its memory holds its values; else a copy of which that is true."""
    if tensor.is_contiguous() and not tensor.is_neg() and not tensor.is_conj():
        return tensor
    return tensor.resolve_conj().resolve_neg().contiguous()
