"""A small GPT with every awkward feature, and its data."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

VOCABULARY, SEQUENCE, BATCH = 37, 12, 2
_SEEDING = threading.Lock()


class ToyBlock(nn.Module):
    def __init__(self, dim: int, frozen_norm: bool = False) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(dim)
        self.qkv = nn.Linear(dim, 3 * dim, bias=False)
        self.out = nn.Linear(dim, dim)
        self.mlp = nn.Sequential(nn.LayerNorm(dim), nn.Linear(dim, 2 * dim), nn.GELU(), nn.Linear(2 * dim, dim))
        self.empty = nn.Parameter(torch.zeros(0, dim))
        if frozen_norm:
            self.norm.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm(x)).chunk(3, -1)
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True)) + self.empty.sum()
        return x + self.mlp(x)


class ToyGPT(nn.Module):
    """Tied embedding and head, frozen positions and norm, a scalar, a zero-size and a never used parameter."""

    def __init__(self, dim: int = 16, layers: int = 3, block: Callable[..., nn.Module] = ToyBlock) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, dim)
        self.positions = nn.Parameter(torch.randn(SEQUENCE, dim) * 0.1, requires_grad=False)
        self.blocks = nn.ModuleList(block(dim, frozen_norm=i == 1) for i in range(layers))
        self.norm = nn.LayerNorm(dim)
        self.head = nn.Linear(dim, VOCABULARY, bias=False)
        self.head.weight = self.tokens.weight
        self.scale = nn.Parameter(torch.tensor(1.0))
        self.unused = nn.Parameter(torch.ones(5))
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.run_blocks(self.tokens(tokens) + self.positions)
        return self.head(self.norm(x)) * self.scale

    def run_blocks(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def build_seeded_model(seed: int = 0, make: Callable[[], nn.Module] = ToyGPT) -> nn.Module:
    """Build the same weights on any thread."""
    with _SEEDING, torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return make()


#: Adam's ``eps`` by default. With torch's 1e-8 a gradient that nearly vanishes moves its parameter by a
#: full lr in a direction set by rounding: a difference of 1e-6 on one processor becomes 1e-4 on another.
EPS = 1e-3


@dataclass(frozen=True)
class TrainingRecipe:
    """Describe a training, for torch and npuzero."""

    steps: int = 10
    micro_batches: int = 1
    clip: float | None = None
    groups: bool = False
    eps: float = EPS


def toy_tokens(step: int, micro_batch: int, rank: int) -> Tensor:
    """Return tokens, [BATCH, SEQUENCE + 1] int64."""
    generator = torch.Generator().manual_seed(1000 * step + 100 * micro_batch + rank)
    return torch.randint(VOCABULARY, (BATCH, SEQUENCE + 1), generator=generator)


def toy_loss(model: nn.Module, tokens: Tensor, **options: Any) -> Tensor:
    """Return cross entropy in float32; ``options`` go to the model's forward."""
    logits = model(tokens[:, :-1], **options)
    return F.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten())


def toy_param_groups(model: nn.Module, recipe: TrainingRecipe) -> Iterable[object]:
    """Return all parameters, or two groups: matrices decay, vectors learn faster and do not."""
    if not recipe.groups:
        return model.parameters()
    matrices = [p for p in model.parameters() if p.dim() >= 2]
    vectors = [p for p in model.parameters() if p.dim() < 2]
    return [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "lr": 2e-2, "weight_decay": 0.0}]
