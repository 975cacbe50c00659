"""Reference of dequantize_sum."""

from __future__ import annotations

import torch

from npuzero.ops.reference._wire import BLOCK, reference_message_bytes


@torch.no_grad()
def reference_dequantize_sum(
    messages: torch.Tensor, out: torch.Tensor, bits: int, rows: int, pieces: int, accumulate: bool
) -> None:
    """Sum the rows in order, in float32; add to `out` if `accumulate`."""
    block, each = BLOCK[bits], out.numel() // pieces
    split, blocks = each * bits // 8, each // block
    total = torch.zeros(())
    for i, row in enumerate(messages.view(rows, pieces, reference_message_bytes(each, bits))):
        upper = row[:, split : split + 2 * blocks].flatten().clone().view(torch.int16).view(pieces, blocks)
        scale = (upper.int() << 16).view(torch.float32)
        value = _unpack_codes(row[:, :split].flatten(), bits).view(pieces, blocks, block) * scale.unsqueeze(-1)
        total = value if i == 0 else total + value
    out.copy_(out.float() + total.view(-1) if accumulate else total.view(-1))


def _unpack_codes(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """Return the codes as float32."""
    if bits == 8:
        return codes.view(torch.int8).float()
    halves = torch.stack([codes & 15, codes >> 4], -1).int()
    return ((halves ^ 8) - 8).float()
