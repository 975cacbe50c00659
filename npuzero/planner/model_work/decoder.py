"""Forward pass of a decoder built by npuzero, to measure its compute and activations."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from npuzero.parallel.tensor_parallel.attention_heads import HEAD_SIZE

#: Usual width of a head, and a width above that of any model.
_HEAD, _TOO_WIDE = 128, 512


class LlamaDecoder(nn.Module):
    """Run a decoder of Llama's architecture on modules of :func:`npuzero.planner.models.modules.build_decoder_modules`.

    int64[B, T] -> logits [B, T, V].
    """

    def __init__(self, modules: nn.Module) -> None:
        super().__init__()
        self._modules.update(modules._modules)
        self._parameters.update(modules._parameters)
        self.layers = nn.ModuleList(_LlamaBlock(block) for block in modules.get_submodule("layers").children())

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.get_submodule("embed_tokens")(tokens)
        head = _head_size(self.layers[0].get_submodule("self_attn"))
        angles = torch.empty(*tokens.shape, head, device=tokens.device)
        rotary = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
        for block in self.layers:
            x = block(x, *rotary)
        logits: Tensor = self.get_submodule("lm_head")(_apply_rms_norm(x, self.get_submodule("norm")))
        return logits


class _LlamaBlock(nn.Module):
    """Run attention and a gated feed-forward layer, each after a norm and with a residual."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self._modules.update(block._modules)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self._attention(_apply_rms_norm(x, self.get_submodule("input_layernorm")), cos, sin)
        mlp = self.get_submodule("mlp")
        y = _apply_rms_norm(x, self.get_submodule("post_attention_layernorm"))
        gate, up, down = (mlp.get_submodule(f"{name}_proj") for name in ("gate", "up", "down"))
        out: Tensor = x + down(F.silu(gate(y)) * up(y))
        return out

    def _attention(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        own = self.get_submodule("self_attn")
        parts = [own.get_submodule(f"{name}_proj")(x) for name in "qkv"]
        head = _head_size(own)
        query, key, value = (part.unflatten(-1, (-1, head)) for part in parts)
        if hasattr(own, "q_norm"):
            query, key = (
                _apply_rms_norm(query, own.get_submodule("q_norm")),
                _apply_rms_norm(key, own.get_submodule("k_norm")),
            )
        query, key, value = (part.transpose(1, 2) for part in (query, key, value))
        query, key = _apply_rotary(query, cos, sin), _apply_rotary(key, cos, sin)
        grouped = key.shape[1] != query.shape[1]
        y = F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=grouped)
        out: Tensor = own.get_submodule("o_proj")(y.transpose(1, 2).flatten(-2))
        return out


def _head_size(attention: nn.Module) -> int:
    """Return the width of a head; a model given only by its size has just one head per tensor rank, so it is split."""
    head = int(vars(attention)[HEAD_SIZE[0]])
    return _HEAD if head > _TOO_WIDE and head % _HEAD == 0 else head


def _apply_rms_norm(x: Tensor, norm: nn.Module) -> Tensor:
    """Return the root mean square norm, computed in float32."""
    wide = x.to(torch.float32)
    wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)
    return norm.get_parameter("weight") * wide.to(x.dtype)


def _apply_rotary(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    left, right = x.chunk(2, dim=-1)
    return x * cos[:, None] + torch.cat((-right, left), dim=-1) * sin[:, None]
