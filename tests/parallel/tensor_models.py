"""Models with layers that tensor ranks divide, with sizes divisible by 2, 3 and 4, and their data."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import (
    Glm4Config,
    Glm4ForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    Olmo2Config,
    Olmo2ForCausalLM,
    Phi3Config,
    Phi3ForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

VOCABULARY, SEQUENCE, BATCH, HIDDEN, LAYERS = 48, 12, 2, 24, 2


class PackedAttention(nn.Module):
    """Packed queries, keys and values with biases, and a norm of each head."""

    def __init__(self) -> None:
        super().__init__()
        self.heads, self.head_dim = 12, 4
        self.qkv = nn.Linear(HIDDEN, 3 * 48)
        self.q_norm = nn.RMSNorm(self.head_dim)
        self.out = nn.Linear(48, HIDDEN)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        q, k, v = (y.view(batch, length, self.heads, -1).transpose(1, 2) for y in self.qkv(x).chunk(3, -1))
        y = F.scaled_dot_product_attention(self.q_norm(q), k, v, is_causal=True)
        return self.out(y.transpose(1, 2).reshape(batch, length, -1))


class TensorBlock(nn.Module):
    """A block with the Linears of its MLP next to its norms."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(HIDDEN), nn.LayerNorm(HIDDEN)
        self.attention = PackedAttention()
        self.gate, self.up = nn.Linear(HIDDEN, 36), nn.Linear(HIDDEN, 36)
        self.down = nn.Linear(36, HIDDEN)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        y = self.norm2(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


class TensorToyGPT(nn.Module):
    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, HIDDEN)
        self.positions = nn.Parameter(torch.randn(SEQUENCE, HIDDEN) * 0.1)
        self.dropout = nn.Dropout(dropout)
        self.blocks = nn.ModuleList(TensorBlock() for _ in range(LAYERS))
        self.norm = nn.LayerNorm(HIDDEN)
        self.head = nn.Linear(HIDDEN, VOCABULARY, bias=False)

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        x = self.dropout(self.tokens(input_ids) + self.positions[: input_ids.shape[1]])
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x))
        return F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())


TOY_PLAN = {
    "blocks.*.attention.qkv": ("packed_colwise", 3),
    "blocks.*.attention.out": "rowwise",
    "blocks.*.gate": "colwise",
    "blocks.*.up": "colwise",
    "blocks.*.down": "rowwise",
}

_SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": HIDDEN,
    "intermediate_size": 36,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 24,
    "num_key_value_heads": 12,
    "max_position_embeddings": 32,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "head_dim": 2,
}


def build_tensor_llama(**more: object) -> PreTrainedModel:
    return LlamaForCausalLM(LlamaConfig(**{**_SIZES, **more}))


def build_tied_llama(**more: object) -> PreTrainedModel:
    return build_tensor_llama(tie_word_embeddings=True, **more)


def biased(**more: object) -> PreTrainedModel:
    """Biases on all Linears, row-parallel ones included."""
    return build_tensor_llama(attention_bias=True, mlp_bias=True, **more)


def qwen2(**more: object) -> PreTrainedModel:
    return Qwen2ForCausalLM(Qwen2Config(**{**_SIZES, "num_attention_heads": 12, "num_key_value_heads": 12, **more}))


def build_tensor_qwen3(**more: object) -> PreTrainedModel:
    return Qwen3ForCausalLM(Qwen3Config(**{**_SIZES, "head_dim": 4, **more}))


def phi3(**more: object) -> PreTrainedModel:
    return Phi3ForCausalLM(Phi3Config(**{**_SIZES, "num_attention_heads": 12, "num_key_value_heads": 12, **more}))


def glm4(**more: object) -> PreTrainedModel:
    return Glm4ForCausalLM(Glm4Config(**{**_SIZES, "head_dim": 4, **more}))


def olmo2(**more: object) -> PreTrainedModel:
    """A norm over all heads of the queries: its plan gathers them."""
    return Olmo2ForCausalLM(Olmo2Config(**{**_SIZES, "num_attention_heads": 12, "num_key_value_heads": 12, **more}))


ZOO: dict[str, Callable[..., nn.Module]] = {
    "ToyGPT": TensorToyGPT,
    "llama": build_tensor_llama,
    "tied": build_tied_llama,
    "biased": biased,
    "qwen2": qwen2,
    "qwen3": build_tensor_qwen3,
    "phi3": phi3,
    "glm4": glm4,
    "olmo2": olmo2,
}


def tensor_plan(name: str) -> dict[str, object] | None:
    return TOY_PLAN if name == "ToyGPT" else None


def tensor_batch(step: int, rank: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1000 * step + rank)
    tokens = torch.randint(3, VOCABULARY, (BATCH, SEQUENCE), generator=generator)
    return {"input_ids": tokens, "labels": tokens}


def tensor_model_loss(model: nn.Module, step: int, rank: int) -> Tensor:
    found = model(**tensor_batch(step, rank))
    return found if isinstance(found, Tensor) else found.loss


def make_stirred_tensor_model(name: str, **config: object) -> Callable[[], nn.Module]:
    """Build the model ``name`` as after some training: no parameter is all zeros or ones."""

    def make() -> nn.Module:
        model = ZOO[name](**config)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(torch.randn_like(parameter) * 0.1)
        return model

    return make
