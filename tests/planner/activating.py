"""Models that are run for their activations: on tokens, in training, with gradients as an engine takes them."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from benchmarks.step.workload import GPTWorkload as Benchmarked
from examples.gpt.model import GPT, GPTConfig
from npuzero.planner import ModelShape, from_config
from npuzero.shard.build import get_unit_parameters
from npuzero.shard.layout.find_units import discover_units

#: As users have them; small, with the ratios of their kind.
CONFIGS: dict[str, dict[str, Any]] = {
    "llama": {
        "model_type": "llama",
        "hidden_size": 128,
        "intermediate_size": 344,
        "num_hidden_layers": 5,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 512,
    },
    "gpt2": {
        "model_type": "gpt2",
        "n_embd": 128,
        "n_head": 4,
        "n_layer": 4,
        "vocab_size": 512,
        "n_positions": 256,
        "bos_token_id": 0,
        "eos_token_id": 0,
    },
    "t5": {
        "model_type": "t5",
        "d_model": 128,
        "d_kv": 32,
        "d_ff": 512,
        "num_layers": 5,
        "num_heads": 4,
        "vocab_size": 512,
    },
    "mixtral": {
        "model_type": "mixtral",
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 512,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
    },
    "bert": {
        "model_type": "bert",
        "hidden_size": 128,
        "intermediate_size": 512,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "vocab_size": 512,
        "max_position_embeddings": 256,
    },
}
#: Models in plain torch.
PLAIN: dict[str, Callable[[], nn.Module]] = {
    "gpt": lambda: GPT(GPTConfig(dim=96, heads=3, layers=4, vocabulary=256)),
    "benchmark's gpt": Benchmarked(dim=128, layers=4, heads=4, sequence=256).model,
}
ALL = (*PLAIN, *CONFIGS)


@dataclass(frozen=True)
class ActivationCase:
    """A model to run, and the shape that the planner is given of it."""

    model: nn.Module
    shape: ModelShape

    @staticmethod
    def of(
        name: str, dtype: torch.dtype = torch.float32, attention: str = "flash", recompute: bool = False
    ) -> ActivationCase:
        """Make it by its name, in training, on the CPU."""
        if name in PLAIN:
            with torch.device("meta"):
                meta = PLAIN[name]()
            model, shape = PLAIN[name](), ModelShape(name, get_unit_parameters(meta), module=lambda: meta)
        else:
            shape = from_config(CONFIGS[name], name)
            assert shape.module is not None
            built = shape.module()
            model = type(built)(built.config)
            if attention == "plain":
                model.set_attn_implementation("eager")
        model = model.to(dtype).train()
        if recompute:
            enable_recomputation(model)
        return ActivationCase(model, shape)

    def loss(self, ids: Tensor) -> Tensor:
        """Return the loss of tokens, int64[B, T]."""
        if not hasattr(self.model, "config") or isinstance(self.model, GPT):
            return F.cross_entropy(self.model(ids).flatten(0, 1).float(), ids.flatten())
        decoder = {"decoder_input_ids": ids} if self.model.config.is_encoder_decoder else {}
        loss: Tensor = self.model(input_ids=ids, labels=ids, use_cache=False, **decoder).loss
        return loss


def enable_recomputation(model: nn.Module) -> None:
    """Have each block keep its inputs alone, as users have it: the model's own way, or torch's."""
    if hasattr(model, "gradient_checkpointing_enable"):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # newer releases know it by another name, too
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        return
    for spec in discover_units(model)[1:]:
        spec.module.forward = checkpoint_forward(spec.module.forward)  # type: ignore[method-assign]


def checkpoint_forward(forward: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Return the forward of a block of which only the inputs are kept."""
    return lambda *args: checkpoint(forward, *args, use_reentrant=False)


def random_tokens(micro_batch: int, sequence: int) -> Tensor:
    """Return int64[B, T], of the first 256 of any vocabulary."""
    return torch.randint(0, 256, (micro_batch, sequence), generator=torch.Generator().manual_seed(0))
