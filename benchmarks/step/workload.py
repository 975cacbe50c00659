"""The workload of every contender: a GPT in plain torch, its data, and their sizes. Independent of contenders.

The model is a basic GPT: learned positions, LayerNorm, GELU, biases, an untied head. With the default sizes it has 25.6
M parameters. Shapes in the comments: B sequences, T positions, D width, H heads, V vocabulary.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}

#: Options of AdamW for every contender; a comparison may use another learning rate.
HYPER: dict[str, Any] = {"lr": 3e-4, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}
MAX_NORM = 1.0


HELP = {
    "precision": "of parameters and communication buffers",
    "batch": "sequences per rank",
    "lr": "learning rate; a wide model without warm-up needs a lower one, or rounding decides its second step",
}


@dataclass(frozen=True)
class GPTWorkload:
    """Sizes of the model and of a step; each is a command line option of the same name."""

    dim: int = 512
    layers: int = 8
    heads: int = 8
    vocabulary: int = 256
    sequence: int = 256
    batch: int = 4
    precision: str = "bf16"
    lr: float = HYPER["lr"]

    @classmethod
    def add_options(cls, parser: argparse.ArgumentParser) -> None:
        for item in fields(cls):
            choices = tuple(DTYPES) if item.name == "precision" else None
            parser.add_argument(
                f"--{item.name.replace('_', '-')}",
                type=type(item.default),
                default=item.default,
                choices=choices,
                help=HELP.get(item.name),
            )

    @classmethod
    def of(cls, options: argparse.Namespace) -> GPTWorkload:
        return cls(**{item.name: getattr(options, item.name) for item in fields(cls)})

    @property
    def dtype(self) -> torch.dtype:
        return DTYPES[self.precision]

    @property
    def hyper(self) -> dict[str, Any]:
        """Return options of AdamW."""
        return HYPER | {"lr": self.lr}

    def model(self) -> BenchmarkGPT:
        """Return the model in float32 on the CPU, with the same weights in every process."""
        torch.manual_seed(0)
        return BenchmarkGPT(self)

    def tokens(self, rank: int, step: int) -> Tensor:
        """Return int64[B, T + 1]: walks of steps 0..3 around the vocabulary; the loss can decrease to ln 4."""
        generator = torch.Generator().manual_seed(1_000_003 * rank + step)
        moves = torch.randint(0, 4, (self.batch, self.sequence + 1), generator=generator)
        return moves.cumsum(1) % self.vocabulary


class GPTBlock(nn.Module):
    """Attention and a feed-forward layer, each with a norm before it and a residual connection."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.attention_norm = nn.LayerNorm(dim)
        self.qkv = nn.Linear(dim, 3 * dim)
        self.out = nn.Linear(dim, dim)
        self.feed_forward_norm = nn.LayerNorm(dim)
        self.up = nn.Linear(dim, 4 * dim)
        self.down = nn.Linear(4 * dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.attention_norm(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)  # [B, H, T, D / H]
        x = x + self.out(y.transpose(1, 2).flatten(-2))
        return x + self.down(F.gelu(self.up(self.feed_forward_norm(x))))


class BenchmarkGPT(nn.Module):
    """int64[B, T] -> logits f32[B, T, V]."""

    def __init__(self, sizes: GPTWorkload) -> None:
        super().__init__()
        self.embedding = nn.Embedding(sizes.vocabulary, sizes.dim)
        self.positions = nn.Embedding(sizes.sequence, sizes.dim)
        self.blocks = nn.ModuleList(GPTBlock(sizes.dim, sizes.heads) for _ in range(sizes.layers))
        self.norm = nn.LayerNorm(sizes.dim)
        self.head = nn.Linear(sizes.dim, sizes.vocabulary, bias=False)
        for weight in self.parameters():
            if weight.ndim == 2:
                nn.init.normal_(weight, std=0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens) + self.positions(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x)).float()


def gpt_loss(model: nn.Module, tokens: Tensor) -> Tensor:
    """Return the mean cross-entropy, in nats, of ``tokens`` int64[B, T + 1], each given the tokens before it."""
    return F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())


def training_step(
    model: nn.Module, optimizer: torch.optim.Optimizer, tokens: Tensor, clip: Callable[[], object] = lambda: None
) -> Callable[[], Tensor]:
    """Return a function that takes one training step on the fixed ``tokens`` and returns its loss."""

    def step() -> Tensor:
        loss = gpt_loss(model, tokens)
        loss.backward()
        clip()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step
