"""Checks that quantize and dequantize_sum share. Contract: csrc/core/wire.h."""

from __future__ import annotations

import torch

from npuzero import _native
from npuzero.errors import ContractError
from npuzero.ops import _check

_START = 64  # bytes
_BLOCK = {8: 256, 4: 128}
_MOST = 2**31 - 1  # messages


def check_messages(
    op: str, name: str, messages: torch.Tensor, values: tuple[str, torch.Tensor], bits: int, rows: int, pieces: int
) -> None:
    """Check bits, rows and pieces, that `values` have full blocks in each piece, and the length of messages."""
    if type(bits) is not int or bits not in _BLOCK:
        raise ContractError(f"{op}: bits", expected="8 or 4", got=repr(bits), do="Pass one of these.")
    _check.check_integer(op, "rows", rows, 1, _MOST)
    _check.check_integer(op, "pieces", pieces, 1, _MOST)
    what, tensor = values
    if tensor.numel() % (pieces * _BLOCK[bits]):
        raise ContractError(
            f"{op}: {what}",
            expected=f"a multiple of {pieces} * {_BLOCK[bits]} elements, whole blocks in each piece",
            got=f"{tensor.numel()} elements",
            do="Pad it with zeros.",
        )
    count = rows * pieces * _native.message_bytes(tensor.numel() // pieces, bits)
    _check.check_flat_tensor(op, name, messages, (torch.uint8,), tensor.device, count)
    if messages.data_ptr() % _START:
        raise ContractError(
            f"{op}: {name}",
            expected=f"an address that is a multiple of {_START}",
            got=f"one that is {messages.data_ptr() % _START} beyond",
            do="Pass a buffer of its own, or cut one at whole messages.",
        )
