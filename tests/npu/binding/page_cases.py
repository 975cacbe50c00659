"""What docs/ascend.md says of attention, and its program, on the fake device."""

from __future__ import annotations

import math
import runpy
from typing import Any

import torch
from torch import Tensor

from npu.fake import compute
from npuzero.comm import World

#: By name: dtype, heads of the keys (4 of the queries), width of a head, dtype of a mask.
CALLS = {
    "bfloat16": (torch.bfloat16, 4, 64, None),
    "float16": (torch.float16, 4, 64, None),
    "float32": (torch.float32, 4, 64, None),
    "grouped heads": (torch.bfloat16, 2, 64, None),
    "boolean mask": (torch.bfloat16, 4, 64, torch.bool),
    "float mask": (torch.bfloat16, 4, 64, torch.bfloat16),
    "wide heads": (torch.bfloat16, 4, 520, None),
}


def find_fused_attention(_world: World) -> list[str]:
    """The calls of scaled_dot_product_attention that end in CANN's fused operator, which the fake device lacks."""
    compute.compute_on_host()
    fused = []
    for name, (dtype, key_heads, width, mask_dtype) in CALLS.items():
        query, key, value = (
            torch.zeros(2, heads, 8, width, dtype=dtype).to("npu") for heads in (4, key_heads, key_heads)
        )
        mask = torch.ones(2, 1, 8, 8).to(mask_dtype).to("npu") if mask_dtype else None
        try:
            torch.nn.functional.scaled_dot_product_attention(
                query, key, value, attn_mask=mask, is_causal=mask is None, enable_gqa=key_heads < 4
            )
        except RuntimeError as error:
            assert "aclnnFlashAttentionScore" in str(error)
            fused.append(name)
    return fused


def run_ascend_program(world: World) -> list[Any]:
    """Run it in this process; attention, which is CANN's, by other operators.

    Returns:
        How attention was called, each way once: whether without a mask, whether causal.
    """
    compute.compute_on_host()
    ways = set()

    def by_parts(query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None, is_causal: bool, **how: Any):
        ways.add((attn_mask is None, is_causal))
        key, value = (whole.repeat_interleave(query.shape[1] // whole.shape[1], 1) for whole in (key, value))
        later = torch.ones(query.shape[2], key.shape[2], dtype=torch.bool).triu(1).to(query.device)
        return (query @ key.mT * how["scale"]).masked_fill(later, -math.inf).softmax(-1) @ value

    torch.nn.functional.scaled_dot_product_attention = by_parts
    runpy.run_path("program.py", run_name="__main__")
    return sorted(ways)
