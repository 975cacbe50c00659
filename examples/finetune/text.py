"""A handful of sentences, as bytes; two dialects of them, one to train on before and one to fine-tune on."""

from __future__ import annotations

import torch
from torch import Tensor

VOCABULARY = 128  # ASCII
LENGTH = 48

SENTENCES = tuple(
    f"the {colour} {animal} {verb} over the {place} and sleeps till the morning comes. ".upper()
    for colour in ("red", "brown", "grey")
    for animal in ("fox", "hare", "owl")
    for verb in ("jumps", "runs", "flies")
    for place in ("hill", "river", "wall")
)
PLAIN = tuple(sentence.lower() for sentence in SENTENCES)


def batch_of(sentences: tuple[str, ...], batch: int, number: int) -> Tensor:
    """[batch, LENGTH] int64: windows of sentences, the same for the same ``number``."""
    generator = torch.Generator().manual_seed(number)
    chosen = torch.randint(len(sentences), (batch,), generator=generator).tolist()
    return torch.tensor([list(sentences[i].encode()[:LENGTH]) for i in chosen])
