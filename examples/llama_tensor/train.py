"""Train a Llama of transformers whose layers are divided over tensor ranks, its training state over data ranks.

    torchrun --standalone --nproc-per-node 4 examples/llama_tensor/train.py --tensor 2 --preset zero3
    python examples/llama_tensor/train.py --tensor 1

The model is transformers' own, unchanged; its config says which layers are divided. Ranks of one tensor group see the
same batch. What is left in ``--out`` are whole weights, whatever the mesh was.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor
from torch.distributed.elastic.multiprocessing.errors import record
from transformers import LlamaConfig, LlamaForCausalLM

import npuzero
from npuzero.plan import DATA

VOCABULARY, SEQUENCE = 128, 32  # ASCII
TEXT = "the quick brown fox jumps over the lazy dog, and the lazy dog sleeps till the morning comes. " * 4

CONFIG = LlamaConfig(
    vocab_size=VOCABULARY,
    hidden_size=64,
    intermediate_size=160,
    num_hidden_layers=4,
    num_attention_heads=8,
    num_key_value_heads=4,
    bos_token_id=1,
    eos_token_id=2,
    pad_token_id=0,
    use_cache=False,
)


def batch_of(step: int, index: int, batch: int) -> Tensor:
    """[batch, SEQUENCE] int64: windows of the text, the same for the same step and index among data ranks."""
    generator = torch.Generator().manual_seed(1000 * step + index)
    starts = torch.randint(len(TEXT) - SEQUENCE, (batch,), generator=generator).tolist()
    return torch.tensor([list(TEXT[start : start + SEQUENCE].encode()) for start in starts])


@record
def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Train a Llama over tensor and data ranks.")
    parser.add_argument("--tensor", type=int, default=2, help="ranks that divide each layer")
    parser.add_argument("--mode", default="msp", help="mtp, msp or fsp")
    parser.add_argument("--preset", default="zero3", help=f"one of {', '.join(npuzero.PRESETS)}")
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--batch", type=int, default=8, help="sequences of a group of tensor ranks")
    parser.add_argument("--out", type=Path, default=None, help="safetensors file for the whole weights")
    options = parser.parse_args(arguments)

    npuzero.init()
    mesh = npuzero.mesh(tensor=options.tensor)
    torch.manual_seed(0)  # the same whole model on every rank
    model = npuzero.parallel.tensor(LlamaForCausalLM(CONFIG), mesh, mode=options.mode)
    model = npuzero.zero(model, plan=options.preset, mesh=mesh)
    optimizer = npuzero.AdamW(model.parameters(), lr=3e-3)
    losses = []
    for step in range(options.steps):
        tokens = batch_of(step, mesh.index(DATA), options.batch)
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        npuzero.clip_grad_norm_(model, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    sent = sum(npuzero.parallel.tensor_bytes(model).values()) // options.steps
    if options.out is not None:
        npuzero.export(model, options.out)
    if mesh.world.rank == 0:
        print(f"{mesh}: loss {losses[0]:.3f} -> {losses[-1]:.3f}; {sent} bytes of activations sent a step")


if __name__ == "__main__":
    main()
