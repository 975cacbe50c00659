"""Values in a few bits each, for a thin wire. Contract: csrc/ops/quantize.h."""

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

    A scale is the block's largest magnitude over 127 or 7, rounded up, and at least 2^-120, so that no code is clipped;
    codes are rounded to nearest, ties to even, and lose half a scale, or a ten-thousandth of one more (block-wise, as
    Dettmers et al., ICLR 2022, and ZeRO++, Wang et al., 2023). A block with an infinity or a NaN becomes NaN as a
    whole, on the other side.

    Args:
        source: float32, bfloat16 or float16, flat, whole blocks in each piece; may be empty.
        message: uint8, as many bytes as `pieces` messages have (csrc/core/wire.h): codes, then scales; what is behind
            the scales is not written. It begins at a multiple of 64 bytes.
        bits: 8 or 4.
        pieces: how many messages `source` becomes, of equal parts of it, side by side: one for each rank.
        residual: float32, as long as source: it is added to source in float32 before rounding, and becomes what
            rounding lost (error feedback, Seide et al., Interspeech 2014); 0 in a block that is not finite.

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
