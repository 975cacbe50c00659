"""Quantize a tensor to a few bits per element for low-bit collectives. Contract: csrc/ops/quantize.h."""

from __future__ import annotations

import torch

from npuzero import _native
from npuzero.ops import _check, _wire
from npuzero.ops.reference import quantize as reference


def quantize(
    source: torch.Tensor,
    message: torch.Tensor,
    *,
    bits: int,
    pieces: int = 1,
    residual: torch.Tensor | None = None,
) -> None:
    """Round `source` to 8 or 4 bits an element, in blocks of 256 or 128 that share a bfloat16 scale.

    A scale is the block's largest magnitude over 127 or 7, rounded up, and at least 2^-120, so that no code is clipped.
    Codes are rounded to nearest, ties to even; the error is at most half a scale plus a ten-thousandth of one
    (block-wise, as Dettmers et al., ICLR 2022, and ZeRO++, Wang et al., 2023). A block with an infinity or a NaN is
    received as all NaN.

    Args:
        source: float32, bfloat16 or float16, flat, a multiple of the block size in each piece; may be empty.
        message: uint8, the bytes of `pieces` messages (csrc/core/wire.h): codes, then scales; bytes after the scales
            are not written. Its address is a multiple of 64 bytes.
        bits: 8 or 4.
        pieces: the number of messages, one for each rank, from equal consecutive parts of `source`.
        residual: float32, as long as source: added to source in float32 before rounding, then set to the rounding error
            (error feedback, Seide et al., Interspeech 2014); 0 in a block that is not finite.

    Raises:
        ContractError: wrong dtype, device, length, alignment or range, or shared memory.
        KernelUnavailable: no kernel for this device in this build.
    """
    _check.check_flat_tensor("quantize", "source", source, _check.FLOATS)
    _wire.check_messages("quantize", "message", message, ("source", source), bits, 1, pieces)
    written = [("message", message)]
    if residual is not None:
        _check.check_flat_tensor("quantize", "residual", residual, (torch.float32,), source.device, source.numel())
        written.append(("residual", residual))
    _check.check_disjoint("quantize", written, [("source", source)])
    if _native.backend() == "reference":
        reference.reference_quantize(source, message, bits, pieces, residual)
        return
    view = _native.tensor_view
    _native.quantize(
        *(view(source), view(message), _native.optional_view(residual)),
        pieces,
        bits,
        _native.current_stream_handle(source.device),
    )
