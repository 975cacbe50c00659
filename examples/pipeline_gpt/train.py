"""Train a GPT over three axes at once: stages of a pipeline, tensor ranks within a stage, and data ranks of ZeRO.

    torchrun --standalone --nproc-per-node 8 examples/pipeline_gpt/train.py --pipe 2 --tensor 2 --preset zero2
    torchrun --standalone --nproc-per-node 2 examples/pipeline_gpt/train.py --schedule interleaved --chunks 2
    python examples/pipeline_gpt/train.py

The model is plain torch, built whole on every rank; which of its parts are called one after another, and which of its
layers tensor ranks divide, is said beside it. Ranks of one pipeline see the same batch. The losses are those of one
rank whatever the mesh and the schedule, but for rounding; checkpoints and ``--out`` have whole tensors.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.elastic.multiprocessing.errors import record

import npuzero
from npuzero.parallel.pipeline_parallel.schedule import NAMES
from npuzero.plan import DATA

VOCABULARY, SEQUENCE, WIDTH, HEADS, LAYERS = 128, 32, 64, 4, 8  # ASCII
TEXT = "the quick brown fox jumps over the lazy dog, and the lazy dog sleeps till the morning comes. " * 4

#: What tensor ranks have of the layers: see docs/tensor.md.
WORDS = {
    "blocks.*.attention.qkv": ("packed_colwise", 3),
    "blocks.*.attention.out": "rowwise",
    "blocks.*.perceptron.up": "colwise",
    "blocks.*.perceptron.down": "rowwise",
}


class Embedding(nn.Module):
    """Look up tokens and positions: [B, T] int64 -> [B, T, WIDTH]."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, WIDTH)
        self.positions = nn.Embedding(SEQUENCE, WIDTH)

    def forward(self, tokens: Tensor) -> Tensor:
        found: Tensor = self.tokens(tokens) + self.positions.weight[: tokens.shape[1]]
        return found


class Attention(nn.Module):
    """Causal self-attention; of tensor ranks each has some of the heads."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, -1, WIDTH // HEADS)).permute(2, 0, 3, 1, 4)  # [B, H, T, K] each
        y: Tensor = self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(-2))
        return y


class Perceptron(nn.Module):
    """Four times as wide inside."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.down(F.gelu(self.up(x)))
        return y


class Block(nn.Module):
    """Attend, then compute: [B, T, WIDTH] -> the same."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(2))
        self.attention, self.perceptron = Attention(), Perceptron()

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norms[0](x))
        y: Tensor = x + self.perceptron(self.norms[1](x))
        return y


class Head(nn.Module):
    """Say how likely each token is: [B, T, WIDTH] -> [B, T, VOCABULARY]."""

    def __init__(self, embedding: nn.Embedding) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.logits = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.logits.weight = embedding.weight  # tied over the first and the last stage

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.logits(self.norm(x))
        return y


class GPT(nn.Module):
    """A GPT whose parts are called one after another."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = Embedding()
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.head = Head(self.embedding.tokens)
        for weight in self.embedding.parameters():
            nn.init.normal_(weight, std=0.1)


def loss_of(logits: Tensor, tokens: Tensor) -> Tensor:
    """Mean cross entropy of the next token."""
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())


def batch_of(step: int, index: int, ranks: int, batch: int) -> Tensor:
    """[batch / ranks, SEQUENCE] int64: windows of the text; the data ranks' together are the same for any number."""
    generator = torch.Generator().manual_seed(step)
    starts = torch.randint(len(TEXT) - SEQUENCE, (batch,), generator=generator).chunk(ranks)[index].tolist()
    return torch.tensor([list(TEXT[start : start + SEQUENCE].encode()) for start in starts])


def options_of(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train a GPT over pipeline, tensor and data ranks.")
    parser.add_argument("--pipe", type=int, help="ranks of a pipeline (2, where the ranks are even)")
    parser.add_argument("--tensor", type=int, help="ranks that divide each layer (2, where there are eight ranks)")
    parser.add_argument("--data", type=int, help="ranks with data of their own (what the others leave)")
    parser.add_argument("--local-size", type=int, help="of these, how many are near each other (those of a host)")
    parser.add_argument("--schedule", default="1f1b", help=", ".join(NAMES))
    parser.add_argument("--chunks", type=int, default=1, help="stages of each rank, with interleaved")
    parser.add_argument("--micro-batches", type=int, default=4)
    parser.add_argument("--preset", default="zero2", help=f"one of {', '.join(npuzero.PRESETS)}")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--batch", type=int, default=16, help="sequences of all data ranks together")
    parser.add_argument("--checkpoint", type=Path, help="folder: resume from what is there, and save at the end")
    parser.add_argument("--out", type=Path, help="safetensors file for the whole weights")
    return parser.parse_args(arguments)


@record
def main(arguments: Sequence[str] | None = None) -> None:
    options = options_of(arguments)
    world = npuzero.init()
    pipe, tensor = options.pipe or 2 - world.size % 2, options.tensor or (1 if world.size % 8 else 2)
    mesh = npuzero.mesh(data=options.data, pipe=pipe, tensor=tensor, local_size=options.local_size)
    torch.manual_seed(0)  # the same whole model on every rank
    model = GPT().to(world.device)
    if tensor > 1:
        npuzero.parallel.tensor(model, mesh, plan=WORDS)
    trained = npuzero.pipeline(
        model,
        mesh,
        plan=options.preset,
        schedule=options.schedule,
        micro_batches=options.micro_batches,
        chunks=options.chunks,
        loss_fn=loss_of,
        blocks=[model.embedding, model.blocks, model.head],
    )
    optimizer = npuzero.AdamW(trained.parameters(), lr=3e-3)
    begin = 0
    if options.checkpoint is not None and npuzero.checkpoint.latest(options.checkpoint):
        begin = npuzero.checkpoint.load(options.checkpoint, trained, optimizer).step
    table = trained.schedule
    if world.rank == 0:
        alive = f"micro-batches alive on rank 0: {table.peak(0)}"
        print(f"{mesh}, {table.name}: {float(table.bubble):.0%} of a step waited, {alive}")
    losses = []
    for step in range(begin, begin + options.steps):
        tokens = batch_of(step, mesh.index(DATA), mesh.size(DATA), options.batch).to(world.device)
        loss = trained.step(tokens, target=tokens)
        npuzero.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        if world.rank == 0 and (step + 1) % 20 == 0:
            print(f"step {step + 1}: loss {losses[-1]:.4f}")
    sent = npuzero.report(trained).bytes_sent
    if options.checkpoint is not None:
        npuzero.checkpoint.save(options.checkpoint, trained, optimizer, step=begin + options.steps)
    if options.out is not None:
        npuzero.export(trained, options.out)
    if world.rank == 0:
        edges = f"{sent.get('send', 0)} bytes of activations and gradients sent a step by rank 0"
        print(f"loss {losses[0]:.4f} -> {losses[-1]:.4f}; {edges}")


if __name__ == "__main__":
    main()
