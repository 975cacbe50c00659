"""Dequantize and sum the messages of several ranks. Contract: csrc/ops/dequantize_sum.h."""

from __future__ import annotations

import torch

from npuzero import _native
from npuzero.errors import ContractError
from npuzero.ops import _check, _wire
from npuzero.ops.reference import dequantize_sum as reference


def dequantize_sum(
    messages: torch.Tensor,
    out: torch.Tensor,
    *,
    bits: int,
    rows: int = 1,
    pieces: int = 1,
    accumulate: bool = False,
) -> None:
    """Sum the messages that `quantize` made on several ranks, row by row in float32, rounded once.

    The result depends only on the messages and their order; a block that was not finite in one row is NaN.

    Args:
        messages: uint8, `rows` times `pieces` consecutive messages (csrc/core/wire.h), row by row. Its address is a
            multiple of 64 bytes.
        out: float32, bfloat16 or float16, flat, a multiple of the block size in each piece; may be empty.
        bits: 8 or 4, as in `quantize`.
        rows: the number of summands, one for each sending rank.
        pieces: the number of messages that make up `out`, for equal consecutive parts of it.
        accumulate: add the sum to `out`, in float32, instead of replacing it.

    Raises:
        ContractError: wrong dtype, device, length, alignment or range, or shared memory.
        KernelUnavailable: no kernel for this device in this build.
    """
    _check.check_flat_tensor("dequantize_sum", "out", out, _check.FLOATS)
    _wire.check_messages("dequantize_sum", "messages", messages, ("out", out), bits, rows, pieces)
    if type(accumulate) is not bool:
        raise ContractError(
            "dequantize_sum: accumulate", expected="True or False", got=repr(accumulate), do="Pass one of these."
        )
    _check.check_disjoint("dequantize_sum", [("out", out)], [("messages", messages)])
    if _native.backend() == "reference":
        reference.reference_dequantize_sum(messages, out, bits, rows, pieces, accumulate)
        return
    view = _native.tensor_view
    stream = _native.current_stream_handle(out.device)
    _native.dequantize_sum(view(messages), view(out), rows, pieces, bits, accumulate, stream)
