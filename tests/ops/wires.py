"""Values for a thin wire, by blocks, and what stands in a message."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from ops import grid

BLOCK = {8: 256, 4: 128}
LARGEST = {8: 127, 4: 7}
ALIGNED = 32  # behind the guard, a multiple of 64 bytes
#: Pieces, and the blocks of each; the last ones are several threads'.
SHAPES = ((1, 0), (3, 0), (1, 1), (2, 1), (1, 5), (3, 7), (1, 1003), (5, 401))


def expected_message_bytes(numel: int, bits: int) -> int:
    """As csrc/core/wire.h says in words."""
    used = numel * bits // 8 + numel // BLOCK[bits] * 2
    return used + -used % 512


def tie_values(n: int, k: int, dtype: torch.dtype) -> torch.Tensor:
    """Values in the middle between two codes; the first is the largest, so that the scale is 4."""
    x = (torch.randint(-k, k, (n,)) + 0.5) * 4
    x[0] = 4 * k
    return x.to(dtype)


def _planted(x: torch.Tensor, *odd: float) -> torch.Tensor:
    x[torch.randperm(len(x))[: len(odd)]] = torch.tensor(odd).to(x.dtype)
    return x


def _payloads(n: int, dtype: torch.dtype) -> torch.Tensor:
    """NaNs of many payloads and both signs, signalling ones among them."""
    patterns = grid.bit_patterns(torch.full((n,), torch.inf, dtype=dtype)).clone()
    signs = torch.iinfo(patterns.dtype).min * (torch.arange(n) % 2)
    return (patterns + 1 + torch.arange(n) % 64 + signs).to(patterns.dtype).view(dtype)


#: Blocks of a kind each: (elements, dtype) to values.
KINDS: dict[str, Callable[[int, torch.dtype], torch.Tensor]] = {
    "many magnitudes": lambda n, dtype: grid.grid_values(n, dtype, special=False),
    "normal": lambda n, dtype: torch.randn(n).to(dtype),
    "small": lambda n, dtype: (torch.randn(n) * (1e-7 if dtype == torch.float16 else 1e-30)).to(dtype),
    "large": lambda n, dtype: (torch.randn(n) * (1e3 if dtype == torch.float16 else 1e30)).to(dtype),
    "zeros": lambda n, dtype: torch.zeros(n, dtype=dtype),
    "zeros of both signs": lambda n, dtype: (torch.randint(0, 2, (n,)) - 0.5).to(dtype) * 0,
    "denormals": lambda n, dtype: (
        torch.randint(-200, 200, (n,)).to(grid.bit_patterns(torch.ones(1, dtype=dtype)).dtype).abs().view(dtype).clone()
    ),
    "about the least scale": lambda n, dtype: (torch.randn(n) * 2.0**-121).to(dtype),
    "halves of the least scale": lambda n, dtype: (torch.randint(-9, 9, (n,)) * 2.0**-121).to(dtype),
    "ties of 127": lambda n, dtype: tie_values(n, 127, dtype),
    "ties of 7": lambda n, dtype: tie_values(n, 7, dtype),
    "an infinity": lambda n, dtype: _planted(torch.randn(n).to(dtype), torch.inf),
    "a NaN": lambda n, dtype: _planted(torch.randn(n).to(dtype), torch.nan),
    "all NaN": _payloads,
    "the largest beside the least": lambda n, dtype: _planted(
        (torch.randn(n) * torch.finfo(dtype).tiny).to(dtype), torch.finfo(dtype).max, -torch.finfo(dtype).max
    ),
    "nothing but the largest": lambda n, dtype: torch.full((n,), -torch.finfo(dtype).max, dtype=dtype),
}


def wire_values(n: int, block: int, dtype: torch.dtype = torch.float32, first: int = 0) -> torch.Tensor:
    """Blocks of every kind in turn, from the one of number `first`."""
    kinds = list(KINDS.values())
    parts = [kinds[(first + i) % len(kinds)](block, dtype) for i in range(n // block)]
    return torch.cat(parts) if parts else torch.zeros(0, dtype=dtype)


def written_bytes(message: torch.Tensor, bits: int, pieces: int, numel: int) -> torch.Tensor:
    """The bytes of each message that are written."""
    each = numel // pieces
    count = each * bits // 8 + each // BLOCK[bits] * 2
    return message.view(pieces, expected_message_bytes(each, bits))[:, :count]


def unwritten_bytes(message: torch.Tensor, bits: int, pieces: int, numel: int) -> torch.Tensor:
    """The bytes of each message that are not written."""
    each = numel // pieces
    count = each * bits // 8 + each // BLOCK[bits] * 2
    return message.view(pieces, expected_message_bytes(each, bits))[:, count:]


def decode_message(message: torch.Tensor, bits: int, pieces: int, numel: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes and the scale of each block, in float64, of a block a row; byte by byte."""
    each, codes, scales = numel // pieces, [], []
    for one in message.view(pieces, -1):
        split = each * bits // 8
        found = [_sign_extend(byte, 8) for byte in one[:split].tolist()]
        if bits == 4:
            found = [_sign_extend(half, 4) for byte in one[:split].tolist() for half in (byte & 15, byte >> 4)]
        codes += found
        behind = one[split : split + each // BLOCK[bits] * 2].tolist()
        scales += [_bf16_of_bytes(low, high) for low, high in zip(behind[::2], behind[1::2], strict=True)]
    return torch.tensor(codes, dtype=torch.float64).view(-1, BLOCK[bits]), torch.tensor(scales, dtype=torch.float64)


def _sign_extend(value: int, bits: int) -> int:
    return value - (value >> (bits - 1) << bits)


def _bf16_of_bytes(low: int, high: int) -> float:
    return float(torch.tensor([low, high], dtype=torch.uint8).view(torch.bfloat16))


def make_messages(rows: Sequence[torch.Tensor], bits: int, pieces: int, quantize: Callable[..., None]) -> torch.Tensor:
    """The messages of several ranks, side by side, behind the start that they must have."""
    size = pieces * expected_message_bytes(rows[0].numel() // pieces, bits)
    messages = torch.zeros(len(rows) * size, dtype=torch.uint8)
    for i, row in enumerate(rows):
        quantize(row, messages[i * size : (i + 1) * size], bits=bits, pieces=pieces)
    return messages
