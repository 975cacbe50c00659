"""Reference of quantize."""

from __future__ import annotations

import torch

from npuzero.ops.reference._wire import BLOCK, reference_message_bytes

_LEAST = 2.0**-120
_LARGEST = {8: 127, 4: 7}
_LOST = 0x7FC0  # a NaN


@torch.no_grad()
def reference_quantize(
    source: torch.Tensor, message: torch.Tensor, bits: int, pieces: int, residual: torch.Tensor | None
) -> None:
    """Write codes and scales of each piece to `message`, and the rounding error to `residual`."""
    block, each = BLOCK[bits], source.numel() // pieces
    x = (source.float() if residual is None else source.float() + residual).view(-1, block)
    finite = x.isfinite().all(1, keepdim=True)
    share = torch.ones((), device=x.device) / _LARGEST[bits]
    upper = _round_scale_up((x.abs().amax(1, keepdim=True) * share).clamp(min=_LEAST))
    scale = (upper << 16).view(torch.float32)
    codes = torch.where(finite, torch.round(x * (1 / scale)), 0.0).to(torch.int8)
    scales = torch.where(finite, upper, _LOST).to(torch.int16).view(-1)
    place = message.view(pieces, reference_message_bytes(each, bits))
    split = each * bits // 8
    place[:, :split] = _pack_codes(codes, bits).view(pieces, split)
    place[:, split : split + each // block * 2] = scales.view(torch.uint8).view(pieces, each // block * 2)
    if residual is not None:
        residual.copy_(torch.where(finite, x - codes * scale, 0.0).view(-1))


def _round_scale_up(x: torch.Tensor) -> torch.Tensor:
    """Return the upper halves of non-negative float32 bit patterns, rounded up; int32."""
    return (x.view(torch.int32) + 0xFFFF) >> 16


def _pack_codes(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """Return int8 codes as bytes, or two 4-bit codes per byte, the first in the lower half."""
    if bits == 8:
        return codes.view(torch.uint8)
    pairs = codes.view(-1, 2).int()
    return ((pairs[:, 0] & 15) | (pairs[:, 1] & 15) << 4).to(torch.uint8)
