"""Storage of masters and moments in plain torch: convert between stored bits and float32 values.

In: float32 tensors, and stored tensors (bfloat16 halves, int16 remainders, uint8 codes). Out: the other form.
``lazy.py`` handles torch's lazy negatives and conjugates.

Storage and contract: csrc/core/flat.h.
"""

from __future__ import annotations

import torch
from torch import Tensor

from npuzero.plan import MOMENT_BLOCK

_MAGNITUDE = {True: 0x7F, False: 0xFF}  # of a code, with and without a sign bit
_DROPPED = 19  # bits of float32's mantissa that a code drops
_LEAST_EXPONENT, _NOT_FINITE = 16, 255


def join_halves(upper: Tensor, remainder: Tensor) -> Tensor:
    """Join two halves, bfloat16[n] and int16[n], into float32[n]."""
    return ((upper.view(torch.int16).int() << 16) + remainder.int()).view(torch.float32)


def split_halves(x: Tensor) -> tuple[Tensor, Tensor]:
    """Split float32[n] in halves: bfloat16[n], to nearest with ties away from zero, and the remainder, int16[n]."""
    remainder = torch.where(x.isnan(), 0, x.view(torch.int32)).to(torch.int16)
    return upper_half(x), remainder


def upper_half(x: Tensor) -> Tensor:
    """Round float32[n] to bfloat16[n], to nearest, ties away from zero."""
    nearest = ((x.view(torch.int32) + 0x8000) >> 16).to(torch.int16).view(torch.bfloat16)
    return torch.where(x.isnan(), x.bfloat16(), nearest)


def copy_changed_low(master: Tensor, low: Tensor) -> None:
    """Copy ``low`` into its float32[n] ``master`` where ``low`` was changed, that is, is not the master rounded."""
    rounded = upper_half(master) if low.dtype == torch.bfloat16 else master.to(low.dtype)
    torch.where(view_bits(rounded) == view_bits(low), master, low.float(), out=master)


def view_bits(x: Tensor) -> Tensor:
    """View floats of 2 or 4 bytes as integers of that size: equal if the floats have the same bits."""
    return x.view(torch.int16 if x.element_size() == 2 else torch.int32)


def stored_numel(numel: int, dtype: torch.dtype) -> int:
    """Return the elements of the tensor that stores a moment of ``numel``: codes, then one exponent per block."""
    return numel + -(-numel // MOMENT_BLOCK) if dtype == torch.uint8 else numel


def decode_moment(stored: Tensor, numel: int, *, signed: bool) -> Tensor:
    """Return the float32[numel] values of a stored moment; a copy.

    Args:
        stored: float32[numel], bfloat16[numel], or uint8: codes and exponents.
        signed: True for exp_avg, which can be negative; False for exp_avg_sq or its maximum.
    """
    if stored.dtype != torch.uint8:
        return stored.to(torch.float32, copy=True)
    codes, exponents = stored[:numel].int(), stored[numel:].int()
    exponent = exponents.repeat_interleave(MOMENT_BLOCK)[:numel]
    magnitude = codes & _MAGNITUDE[signed]
    bias = (exponent - (_MAGNITUDE[signed] >> 4)) << 4
    value = torch.where(magnitude == 0, 0, (magnitude + bias) << _DROPPED).view(torch.float32)
    value = torch.where(codes != magnitude, -value, value)
    return torch.where(exponent == _NOT_FINITE, torch.nan, value)


def encode_moment(x: Tensor, stored: Tensor, *, signed: bool, draws: Tensor | None = None) -> None:
    """Store float32[n] ``x`` in ``stored``, to nearest, or stochastically by ``draws``, int[n] of 16 bits.

    To nearest, a moment from :func:`decode_moment` is stored with the same bits again.
    """
    if stored.dtype == torch.float32:
        stored.copy_(x)
    elif stored.dtype == torch.bfloat16:
        stored.copy_(upper_half(x) if draws is None else round_stochastically(x, draws))
    else:
        _encode_blocks(
            x, stored, signed, torch.tensor(1 << (_DROPPED - 1)) if draws is None else draws << (_DROPPED - 16)
        )


def read_moment(stored: Tensor, numel: int, own: slice, *, signed: bool) -> Tensor:
    """Read the range ``own`` of a stored moment of ``numel`` elements as float32.

    For codes the range starts at the start of a block.
    """
    return decode_moment(torch.cat(_moment_slices(stored, numel, own)), own.stop - own.start, signed=signed)


def write_moment(
    x: Tensor, stored: Tensor, numel: int, own: slice, *, signed: bool, draws: Tensor | None = None
) -> None:
    """Write by :func:`encode_moment` into the range that :func:`read_moment` reads."""
    if not x.numel():
        return
    pieces = _moment_slices(stored, numel, own)
    whole = torch.cat(pieces)
    encode_moment(x, whole, signed=signed, draws=draws)
    for piece, part in zip(pieces, whole.split([piece.numel() for piece in pieces]), strict=True):
        piece.copy_(part)


def _moment_slices(stored: Tensor, numel: int, own: slice) -> list[Tensor]:
    if stored.dtype != torch.uint8:
        return [stored[own]]
    first, last = own.start // MOMENT_BLOCK, -(-own.stop // MOMENT_BLOCK)
    return [stored[own], stored[numel + first : numel + last]]


def _encode_blocks(x: Tensor, stored: Tensor, signed: bool, added: Tensor) -> None:
    n, span = x.numel(), _MAGNITUDE[signed] >> 4
    pattern = x.view(torch.int32).long() & 0xFFFFFFFF
    absolute = pattern & 0x7FFFFFFF
    blocks = torch.nn.functional.pad(absolute, (0, -n % MOMENT_BLOCK)).view(-1, MOMENT_BLOCK)
    exponents = ((blocks.amax(1) + (1 << _DROPPED) - 1) >> 23).clamp(min=_LEAST_EXPONENT)
    exponent = exponents.repeat_interleave(MOMENT_BLOCK)[:n]
    magnitude = (((absolute + added) >> _DROPPED) - ((exponent - span) << 4)).clamp(min=1)
    magnitude[absolute < ((exponent - span - 1) << 23 if signed else 1)] = 0
    code = magnitude | (pattern >> 31 << 7) if signed else magnitude
    code[exponent >= _NOT_FINITE] = 0
    stored[:n].copy_(code)
    stored[n:].copy_(exponents.clamp(max=_NOT_FINITE))


def round_stochastically(x: Tensor, draws: Tensor) -> Tensor:
    """Round float32[n] to bfloat16[n]: away from zero with the probability of the dropped bits; see csrc/ops/cast.h.

    Args:
        draws: int64[n] of 16 bits each.
    """
    pattern = x.view(torch.int32).to(torch.int64) & 0xFFFFFFFF
    kept = (pattern + draws) >> 16
    signed = torch.where(kept > 0x7FFF, kept - 0x10000, kept).to(torch.int16)
    return torch.where(x.isfinite(), signed.view(torch.bfloat16), x.bfloat16())
