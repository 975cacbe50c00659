"""An unchanged Llama of transformers as the workload of benchmarks with ranks that share a batch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.step.workload import GPTWorkload


@dataclass(frozen=True)
class LlamaSizes(GPTWorkload):
    """Sizes of the model and of a step. The default model has 32.0 M parameters."""

    vocabulary: int = 8192
    key_value_heads: int = 4
    hidden: int = 1408
    batch: int = 1
    precision: str = "fp32"

    def model(self) -> Any:
        """Return the model in float32 on the CPU, with the same weights in every process."""
        from transformers import LlamaConfig, LlamaForCausalLM  # slow to import, and not needed for sizes alone

        torch.manual_seed(0)
        return LlamaForCausalLM(
            LlamaConfig(
                vocab_size=self.vocabulary,
                hidden_size=self.dim,
                intermediate_size=self.hidden,
                num_hidden_layers=self.layers,
                num_attention_heads=self.heads,
                num_key_value_heads=self.key_value_heads,
                max_position_embeddings=self.sequence,
                use_cache=False,
            )
        )


def llama_loss(model: nn.Module, tokens: Tensor) -> Tensor:
    """Return the mean cross-entropy, in nats, of ``tokens`` int64[B, T + 1], each given the tokens before it."""
    logits = model(input_ids=tokens[:, :-1]).logits.float()
    return F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
