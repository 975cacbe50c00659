"""Reference of norm."""

from __future__ import annotations

import torch

_BLOCK, _LANES = 4096, 32


@torch.no_grad()
def reference_norm(x: torch.Tensor, out: torch.Tensor, addend: torch.Tensor | None = None, scale: float = 1.0) -> None:
    """Write {sum x^2, number of non-finite x} in float64, after adding addend * scale to x in float32 if given."""
    if addend is not None:
        x.copy_(x + addend.float() * torch.tensor(scale, dtype=torch.float32, device=x.device))
    out[0] = _sum_of_squares(x)
    out[1] = x.numel() - x.isfinite().sum()


def _sum_of_squares(x: torch.Tensor) -> torch.Tensor:
    """Sum in the contract's order. The last block is padded with zeros, which do not change the sum."""
    steps = torch.nn.functional.pad(x, (0, -x.numel() % _BLOCK)).view(-1, _BLOCK // _LANES, _LANES)
    sums = torch.zeros(len(steps), _LANES, dtype=torch.float64, device=x.device)
    for step in steps.unbind(1):
        sums += step.double().square()
    while sums.shape[1] > 1:
        sums = torch.add(*sums.chunk(2, 1))
    blocks = sums[:, 0]
    while len(blocks) > 1:
        blocks = torch.nn.functional.pad(blocks, (0, len(blocks) % 2)).view(-1, 2).sum(1)
    return blocks.sum()
