"""Reference of cast, and the random draws of stochastic rounding."""

from __future__ import annotations

import torch

from npuzero.ops import storage

_LOW32 = 0xFFFFFFFF
_COLUMNS = 2048  # csrc/ops/cast.h


@torch.no_grad()
def reference_cast(src: torch.Tensor, dst: torch.Tensor, rounding: str, seed: int, offset: int) -> None:
    """Write `src` into `dst` in `dst`'s dtype."""
    if rounding == "nearest":
        dst.copy_(src.float())
    elif rounding == "tf32":
        dst.copy_(round_to_tf32(src))
    elif rounding == "away":
        dst.copy_(storage.upper_half(src))
    else:
        place = torch.arange(offset, offset + src.numel(), dtype=torch.int64, device=src.device)
        dst.copy_(storage.round_stochastically(src, stochastic_draws(place, seed)))


def round_to_tf32(x: torch.Tensor) -> torch.Tensor:
    """Round float32[n] to 10 bits of mantissa, to nearest, ties away from zero."""
    wide = x.double()
    _, exponent = torch.frexp(wide)  # |x| in [2^(exponent-1), 2^exponent)
    unit = torch.exp2((exponent.clamp(min=-125) - 11).double())  # denormals share the smallest normal number's unit
    rounded = torch.copysign(torch.floor(wide.abs() / unit + 0.5) * unit, wide)
    return torch.where(x.isfinite(), rounded, wide).float()


def stochastic_draws(place: torch.Tensor, seed: int, stream: int = 0, step: int = 0) -> torch.Tensor:
    """Draw 16 random bits for each element from its place in the stream; int64 in and out.

    They combine a word of its row and a word of its column.
    """
    columns = torch.arange(_COLUMNS, device=place.device)
    high = _LOW32 - 2**32  # upper half of the counter: 2^32 - 1, as a signed int64
    words = _select_word(columns % 4, philox_words((high << 32) + columns // 4, seed))
    column = words[place % _COLUMNS]
    rows, of_place = torch.unique(place // _COLUMNS, return_inverse=True)
    row = _select_word(rows % 4, philox_words(rows // 4, seed, stream, step))[of_place]
    line = (column >> 17) + (row >> 19)
    return (column + row + line * line) & 0xFFFF


def _select_word(which: torch.Tensor, words: list[torch.Tensor]) -> torch.Tensor:
    """Return the word of each Philox draw that `which` indexes."""
    return torch.stack(words).gather(0, which.unsqueeze(0)).squeeze(0)


def philox_words(counter: torch.Tensor, seed: int, stream: int = 0, step: int = 0) -> list[torch.Tensor]:
    """Return the four words of Philox4x32-10 (Salmon et al., SC 2011), int64[n] in and out.

    Products wrap as unsigned ones do.
    """
    rest = [torch.full_like(counter, word) for word in (stream, step)]
    words = [counter & _LOW32, (counter >> 32) & _LOW32, *rest]
    key = [seed & _LOW32, seed >> 32]
    for _ in range(10):
        first, second = words[0] * 0xD2511F53, words[2] * 0xCD9E8D57
        words = [
            ((second >> 32) & _LOW32) ^ words[1] ^ key[0],
            second & _LOW32,
            ((first >> 32) & _LOW32) ^ words[3] ^ key[1],
            first & _LOW32,
        ]
        key = [(key[0] + 0x9E3779B9) & _LOW32, (key[1] + 0xBB67AE85) & _LOW32]
    return words
