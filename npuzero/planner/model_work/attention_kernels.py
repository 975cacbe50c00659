"""Make the meta device save for backward the same tensors as a device's fused kernels, which meta would decompose."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

_ATEN = torch.ops.aten


class DeviceKernels(TorchFunctionMode):
    """Choose the kernels of attention, dropout and norms as a device does.

    Args:
        plain: whether attention keeps its scores.
        cpu: choose as the CPU, which has fewer fused kernels.
    """

    def __init__(self, plain: bool, cpu: bool) -> None:
        super().__init__()
        self._plain, self._cpu = plain, cpu
        self._own: dict[Callable[..., Any], Callable[..., Tensor]] = {F.scaled_dot_product_attention: self._attend}
        if not cpu:
            self._own |= {F.dropout: _native_dropout, F.rms_norm: _call_fused_rms_norm}

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return self._own.get(func, func)(*args, **(kwargs or {}))

    def _attend(  # noqa: PLR0917 - torch's own arguments
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        # Fused kernels give a mask no gradient, and the CPU's have no dropout: then scores are kept.
        if self._plain or (attn_mask is not None and attn_mask.requires_grad) or (dropout_p and self._cpu):
            out, _ = _ATEN._scaled_dot_product_attention_math(
                query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
            )
        else:  # saves inputs, output and one number per row; dropout: a seed
            out, _ = _ATEN._scaled_dot_product_flash_attention_for_cpu(
                query, key, value, 0.0, is_causal, attn_mask=attn_mask, scale=scale
            )
        return out  # type: ignore[no-any-return]


def _native_dropout(input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
    """Apply dropout that saves a mask of one byte per element."""
    return torch.native_dropout(input, p, True)[0] if training and p else input


def _call_fused_rms_norm(
    input: Tensor, normalized_shape: Sequence[int], weight: Tensor | None = None, eps: float | None = None
) -> Tensor:
    """Compute the norm by the fused kernel, which saves its input and one number per row."""
    least = torch.finfo(input.dtype).eps if eps is None else eps
    out: Tensor = _ATEN._fused_rms_norm(input, list(normalized_shape), weight, least)[0]
    return out
