"""A byte-level GPT in plain torch: RMSNorm, rotary positions, SwiGLU, tied embedding, no biases.

It knows nothing of npuzero: ``npuzero.zero`` cuts it from outside, and the exported weights load back into it.
Shapes in the comments: B sequences, T positions, D model width, H heads, K = D / H, V = 256 bytes.
"""

# mypy: disable-error-code="no-any-return"
# (calling an nn.Module is typed Any)

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True)
class GPTConfig:
    """The model's shape. ``dim / heads`` must be a whole, even number (rotary positions turn pairs)."""

    dim: int = 96
    layers: int = 6
    heads: int = 3
    vocabulary: int = 256
    rope_base: float = 10_000.0
    norm_eps: float = 1e-5

    def __post_init__(self) -> None:
        if self.dim % (2 * self.heads):
            raise ValueError(f"dim {self.dim} must be a multiple of 2 * heads = {2 * self.heads}")

    @property
    def hidden(self) -> int:
        """Width inside the SwiGLU: 8/3 dim, rounded up to a multiple of 32 (as many weights as a 4 dim MLP)."""
        return -(-8 * self.dim // 96) * 32


def rotary(positions: int, width: int, base: float, device: torch.device) -> tuple[Tensor, Tensor]:
    """Cosines and sines of the rotary angles, each f32[T, K/2] (Su et al. 2021, arXiv:2104.09864)."""
    rates = base ** -(torch.arange(0, width, 2, device=device, dtype=torch.float32) / width)
    angles = torch.outer(torch.arange(positions, device=device, dtype=torch.float32), rates)
    return angles.cos(), angles.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn the pairs (x[k], x[k + K/2]) by their position's angle, in f32. [B, H, T, K] -> the same, x's dtype."""
    left, right = x.float().chunk(2, dim=-1)
    return torch.cat((left * cos - right * sin, right * cos + left * sin), dim=-1).type_as(x)


class Attention(nn.Module):
    """Causal self-attention."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.heads = config.heads
        self.qkv = nn.Linear(config.dim, 3 * config.dim, bias=False)
        self.out = nn.Linear(config.dim, config.dim, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)  # [B, H, T, K] each
        y = F.scaled_dot_product_attention(rotate(q, cos, sin), rotate(k, cos, sin), v, is_causal=True)
        return self.out(y.transpose(1, 2).flatten(-2))  # [B, T, D]


class SwiGLU(nn.Module):
    """The gated feed-forward layer (Shazeer 2020, arXiv:2002.05202)."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.gate_up = nn.Linear(config.dim, 2 * config.hidden, bias=False)
        self.down = nn.Linear(config.hidden, config.dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate_up(x).chunk(2, dim=-1)
        return self.down(F.silu(gate) * up)


class Block(nn.Module):
    """One layer: attention and feed-forward, each behind a norm and beside the residual."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(config.dim, eps=config.norm_eps)
        self.attention = Attention(config)
        self.feed_forward_norm = nn.RMSNorm(config.dim, eps=config.norm_eps)
        self.feed_forward = SwiGLU(config)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x), cos, sin)
        return x + self.feed_forward(self.feed_forward_norm(x))


class GPT(nn.Module):
    """Bytes in, next-byte logits out; ``head.weight`` is ``embedding.weight``."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.config = config
        self.embedding = nn.Embedding(config.vocabulary, config.dim)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = nn.RMSNorm(config.dim, eps=config.norm_eps)
        self.head = nn.Linear(config.dim, config.vocabulary, bias=False)
        self.head.weight = self.embedding.weight
        for name, weight in self.named_parameters():
            if weight.ndim == 2:  # outputs as large as inputs; what adds to the residual shrinks with depth
                residual = name.endswith(("out.weight", "down.weight"))
                nn.init.normal_(weight, std=(weight.shape[1] * (2 * config.layers if residual else 1)) ** -0.5)

    def forward(self, tokens: Tensor) -> Tensor:
        """int64[B, T] -> logits f32[B, T, V]."""
        config = self.config
        cos, sin = rotary(tokens.shape[1], config.dim // config.heads, config.rope_base, tokens.device)
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x, cos, sin)
        return self.head(self.norm(x)).float()


def next_byte_loss(model: nn.Module, window: Tensor) -> Tensor:
    """Mean cross-entropy in nats of each byte of ``window`` u8[B, T + 1] given those before it; a scalar, f32."""
    tokens = window.long()
    return F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())


@torch.no_grad()
def generate(
    model: GPT,
    prompt: bytes,
    count: int,
    *,
    context: int = 256,
    temperature: float = 0.8,
    top_k: int = 40,
    seed: int = 0,
) -> bytes:
    """Continue ``prompt`` by ``count`` sampled bytes; the same seed gives the same bytes.

    Args:
        context: how many of the last bytes the model sees: at most the length it was trained on.
        temperature: below 1 sharpens the distribution; 0 takes the likeliest byte.
        top_k: only the ``top_k`` likeliest bytes are drawn from.
    """
    device = model.embedding.weight.device
    generator = torch.Generator().manual_seed(seed)  # drawn on the CPU: every device continues alike
    tokens = torch.frombuffer(bytearray(prompt), dtype=torch.uint8).long().to(device)
    for _ in range(count):
        logits = model(tokens[None, -context:])[0, -1].cpu()
        values, choices = logits.topk(1 if temperature == 0 else top_k)
        drawn = torch.multinomial((values / (temperature or 1.0)).softmax(-1), 1, generator=generator)
        tokens = torch.cat((tokens, choices[drawn].to(device)))
    return bytes(tokens.tolist())
