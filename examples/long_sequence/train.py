"""Train a small Llama of transformers on sequences that ranks share, its weights sharded over some of them.

    torchrun --standalone --nproc-per-node 4 examples/long_sequence/train.py --sequence 2 --weights 2
    python examples/long_sequence/train.py

Each sequence has one word at its beginning that it is asked for near its end, thousands of noise tokens later: on
another rank. Only the answers are labels, and the last ranks of a sequence have all of them.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor
from torch.distributed.elastic.multiprocessing.errors import record
from transformers import LlamaConfig, LlamaForCausalLM

import npuzero
from npuzero import parallel

WORDS, ASK, VOCABULARY = 8, 8, 64  # tokens: the words, the question, and noise
QUESTIONS = 16


def sequences(count: int, length: int, seed: int) -> dict[str, Tensor]:
    """Return whole sequences: a word, noise, and in the last quarter questions with that word as their answer."""
    draw = torch.Generator().manual_seed(seed)
    tokens = torch.randint(ASK + 1, VOCABULARY, (count, length), generator=draw)
    words = torch.randint(WORDS, (count, 1), generator=draw)
    asked = length - 2 * torch.arange(1, QUESTIONS + 1)
    tokens[:, :1], tokens[:, asked], tokens[:, asked + 1] = words, ASK, words
    labels = torch.full_like(tokens, -100)
    labels[:, asked + 1] = words
    return {"input_ids": tokens, "labels": labels}


@record
def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Train on long sequences that ranks share.")
    parser.add_argument("--sequence", type=int, default=0, help="ranks that share a sequence; default: all")
    parser.add_argument("--weights", type=int, default=0, help="ranks that share the weights; default: all")
    parser.add_argument("--length", type=int, default=4096, help="tokens of a sequence")
    parser.add_argument("--batch", type=int, default=4, help="sequences of the ranks that share them")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--out", type=Path, default=Path("runs/long_sequence"), help="folder for the result")
    options = parser.parse_args(arguments)

    world = npuzero.init()
    shared = options.sequence or world.size
    groups, group = world.size // shared, world.rank // shared  # of ranks that share sequences
    mesh = npuzero.mesh(sequence=shared)
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 8}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=VOCABULARY, max_position_embeddings=options.length, **sizes))
    parallel.sequence(model, mesh)
    npuzero.zero(model, plan="isp", local_size=options.weights or world.size, mesh=mesh)
    optimizer = npuzero.AdamW(model.parameters(), lr=options.lr)
    losses = []
    for step in range(options.steps):
        whole = sequences(options.batch, options.length, step * groups + group)
        part = {name: value.to(world.device) for name, value in parallel.slice(whole, mesh).items()}
        loss = model(**part).loss  # the mean over all labels of all ranks
        loss.backward()
        npuzero.clip_grad_norm_(model, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    if world.rank == 0:
        options.out.mkdir(parents=True, exist_ok=True)
        found = {"losses": losses, "ranks": world.size, "tokens of a rank": options.batch * options.length // shared}
        (options.out / "result.json").write_text(json.dumps(found) + "\n")
        print(f"loss {losses[0]:.3f} -> {losses[-1]:.3f}, {found['tokens of a rank']} tokens a rank and step")


if __name__ == "__main__":
    main()
