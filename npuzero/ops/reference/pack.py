"""Reference of pack and unpack."""

from __future__ import annotations

from collections.abc import Sequence

import torch


@torch.no_grad()
def reference_pack(
    sources: Sequence[torch.Tensor],
    targets: Sequence[torch.Tensor],
    scale: float | torch.Tensor | None,
    accumulate: bool,
) -> None:
    """Compute target = source * scale, or target + source * scale, in float32, then cast to target's dtype."""
    for source, target in zip(sources, targets, strict=True):
        value = source.reshape(-1).float()
        if scale is not None:
            value = value * torch.as_tensor(scale, dtype=torch.float32, device=value.device)
        if accumulate:
            value = target.reshape(-1).float() + value
        target.view(-1).copy_(value)
