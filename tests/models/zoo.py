"""Small transformers models, built from their configs, and their data. Nothing in them is changed for npuzero."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    PreTrainedModel,
    T5Config,
    T5ForConditionalGeneration,
    ViTConfig,
    ViTForImageClassification,
)

VOCABULARY, SEQUENCE, BATCH, CLASSES, PIXELS = 37, 8, 2, 5, 8

_DECODER = {
    "vocab_size": VOCABULARY,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 32,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}


def gpt2(**more: object) -> PreTrainedModel:
    sizes = {"vocab_size": VOCABULARY, "n_positions": 32, "n_embd": 16, "n_layer": 2, "n_head": 2}
    still = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    return GPT2LMHeadModel(GPT2Config(**sizes, **still, bos_token_id=1, eos_token_id=2, pad_token_id=0, **more))


def llama(**more: object) -> PreTrainedModel:
    return LlamaForCausalLM(LlamaConfig(**_DECODER, **more))


def mixtral(**more: object) -> PreTrainedModel:
    """Experts are 3-D weights; their router's losses take part."""
    return MixtralForCausalLM(
        MixtralConfig(
            **_DECODER, **{"num_local_experts": 4, "num_experts_per_tok": 2, "output_router_logits": True} | more
        )
    )


def t5(**more: object) -> PreTrainedModel:
    """T5 1.1: a ReLU of the first T5 turns rounding into other gradients where its input nearly vanishes."""
    sizes = {"vocab_size": VOCABULARY, "d_model": 16, "d_kv": 8, "d_ff": 24, "num_layers": 2, "num_heads": 2}
    sizes["feed_forward_proj"] = "gated-gelu"
    return T5ForConditionalGeneration(
        T5Config(**sizes, dropout_rate=0.0, decoder_start_token_id=0, pad_token_id=0, eos_token_id=1, **more)
    )


def vit(**more: object) -> PreTrainedModel:
    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 24}
    still = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    return ViTForImageClassification(
        ViTConfig(**sizes, **still, image_size=PIXELS, patch_size=4, num_labels=CLASSES, **more)
    )


ZOO: dict[str, Callable[..., PreTrainedModel]] = {f.__name__: f for f in (gpt2, llama, mixtral, t5, vit)}


def zoo_batch(model: nn.Module, step: int, micro_batch: int, rank: int) -> dict[str, Tensor]:
    """What ``model`` is called with, labels among it."""
    model = getattr(model, "get_base_model", lambda: model)()  # what PEFT has put its own around
    generator = torch.Generator().manual_seed(1000 * step + 100 * micro_batch + rank)
    if isinstance(model, ViTForImageClassification):
        pixels = torch.randn(BATCH, 3, PIXELS, PIXELS, generator=generator)
        return {"pixel_values": pixels, "labels": torch.randint(CLASSES, (BATCH,), generator=generator)}
    tokens = torch.randint(3, VOCABULARY, (BATCH, SEQUENCE), generator=generator)
    if isinstance(model, T5ForConditionalGeneration):
        return {
            "input_ids": tokens,
            "labels": torch.randint(3, VOCABULARY, (BATCH, SEQUENCE // 2), generator=generator),
        }
    return {"input_ids": tokens, "labels": tokens}
