"""The example's model: causal, tied, and sampled alike from alike seeds."""

from __future__ import annotations

import math

import pytest
import torch
from model import GPT, GPTConfig, generate, next_byte_loss, rotary, rotate

TINY = GPTConfig(dim=32, layers=2, heads=2)


@pytest.fixture
def gpt() -> GPT:
    torch.manual_seed(0)
    return GPT(TINY)


def random_window(rows: int = 2, length: int = 17) -> torch.Tensor:
    return torch.randint(256, (rows, length), dtype=torch.uint8, generator=torch.Generator().manual_seed(1))


def test_no_position_sees_a_later_byte(gpt: GPT) -> None:
    tokens = random_window().long()
    changed = tokens.clone()
    changed[:, 9:] = 255 - changed[:, 9:]
    before, after = gpt(tokens), gpt(changed)
    torch.testing.assert_close(before[:, :9], after[:, :9], rtol=0, atol=1e-6)
    assert (before[:, 9:] - after[:, 9:]).abs().amax() > 1e-3


def test_embedding_and_head_are_one_weight(gpt: GPT) -> None:
    assert gpt.head.weight is gpt.embedding.weight
    names = [name for name, _ in gpt.named_parameters()]
    assert "embedding.weight" in names
    assert "head.weight" not in names


def test_an_untrained_model_guesses_evenly(gpt: GPT) -> None:
    assert next_byte_loss(gpt, random_window(8, 65)).item() == pytest.approx(math.log(256), abs=0.8)


def test_rotary_angles_depend_on_the_distance_only() -> None:
    q, k = torch.randn(2, 1, 1, 1, 8, generator=torch.Generator().manual_seed(2)).expand(2, 1, 1, 6, 8)
    cos, sin = rotary(6, 8, 10_000.0, torch.device("cpu"))
    scores = (rotate(q, cos, sin) @ rotate(k, cos, sin).transpose(-1, -2))[0, 0]
    for distance in range(-5, 6):
        diagonal = scores.diagonal(distance)
        torch.testing.assert_close(diagonal, diagonal[:1].expand_as(diagonal))


def test_computes_in_bfloat16(gpt: GPT) -> None:
    logits = gpt.bfloat16()(random_window().long())
    assert logits.dtype is torch.float32
    assert logits.isfinite().all()


def test_a_seed_fixes_the_continuation(gpt: GPT) -> None:
    first = generate(gpt, b"def ", 24, context=16, seed=3)
    assert first == generate(gpt, b"def ", 24, context=16, seed=3)
    assert first != generate(gpt, b"def ", 24, context=16, seed=4)
    assert first.startswith(b"def ")
    assert len(first) == 4 + 24


def test_temperature_zero_takes_the_likeliest_byte(gpt: GPT) -> None:
    likeliest = gpt(torch.tensor([list(b"def ")]))[0, -1].argmax().item()
    assert generate(gpt, b"def ", 1, temperature=0)[-1] == likeliest


def test_width_must_split_into_pairs() -> None:
    with pytest.raises(ValueError, match="dim 30"):
        GPTConfig(dim=30, heads=4)
