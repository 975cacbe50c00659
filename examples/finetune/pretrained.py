"""Make what others download: a small Llama, trained for some steps by plain PyTorch, as transformers saves it."""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from text import PLAIN, VOCABULARY, batch_of
from transformers import LlamaConfig, LlamaForCausalLM


def make(folder: Path, steps: int = 60) -> float:
    """Train and save it; return the last loss."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 3, "num_attention_heads": 4}
    special = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=VOCABULARY, max_position_embeddings=128, **sizes, **special))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    loss = torch.zeros(())
    for step in range(steps):
        tokens = batch_of(PLAIN, 8, step)
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    model.save_pretrained(folder, max_shard_size="200KB")
    return loss.item()


if __name__ == "__main__":
    target = Path(sys.argv[1] if len(sys.argv) > 1 else "runs/pretrained")
    print(f"loss {make(target):.3f}; left in {target}")
