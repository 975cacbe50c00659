from __future__ import annotations

import torch


@torch.no_grad()
def norm(x: torch.Tensor, out: torch.Tensor, addend: torch.Tensor | None = None, scale: float = 1.0) -> None:
    """x += addend * scale where there is one, in float32. out = {sum x^2, number of non-finite x}, in float64."""
    if addend is not None:
        x.copy_(x + addend.float() * torch.tensor(scale, dtype=torch.float32, device=x.device))
    out[0] = x.double().square().sum()
    out[1] = x.numel() - x.isfinite().sum()
