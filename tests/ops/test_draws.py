"""The draws of stochastic rounding (csrc/ops/cast.h): their bits, and that their sums behave as independent ones do."""

from __future__ import annotations

import pytest
import torch

from npuzero import ops
from npuzero.ops.reference import cast as reference

COLUMNS = 2048
LOW32 = 0xFFFFFFFF
#: Beside borders of rows, of blocks of four rows, and of the counter's words.
PLACES = [near + d for near in (0, COLUMNS, 4 * COLUMNS, 2**45, 2**45 + COLUMNS, 2**62) for d in (-2, -1, 0, 1, 5)][2:]
FIVE = 5.0  # standard deviations


def philox_by_hand(counter: list[int], key: list[int]) -> list[int]:
    """Philox4x32-10 as published, in Python integers."""
    (a, b, c, d), (k, q) = counter, key
    for _ in range(10):
        x, y = a * 0xD2511F53, c * 0xCD9E8D57
        a, b, c, d = (y >> 32) ^ b ^ k, y & LOW32, (x >> 32) ^ d ^ q, x & LOW32
        k, q = (k + 0x9E3779B9) & LOW32, (q + 0xBB67AE85) & LOW32
    return [a, b, c, d]


def draw_by_hand(place: int, seed: int, stream: int = 0, step: int = 0) -> int:
    """The contract's, in Python integers."""
    key, (row, column) = [seed & LOW32, seed >> 32], divmod(place, COLUMNS)
    c = philox_by_hand([column // 4, LOW32, 0, 0], key)[column % 4]
    r = philox_by_hand([row // 4 & LOW32, row // 4 >> 32, stream, step], key)[row % 4]
    line = (c >> 17) + (r >> 19)
    assert line * line < 2**31
    return (c + r + line * line) % 2**16


def test_philox_gives_the_published_answers() -> None:
    # kat_vectors of the authors' Random123 library
    assert philox_by_hand([0] * 4, [0] * 2) == [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]
    assert philox_by_hand([LOW32] * 4, [LOW32] * 2) == [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]
    pi = [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344]
    assert philox_by_hand(pi, [0xA4093822, 0x299F31D0]) == [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1]
    for counter, seed in ((0, 0), (1, 2**64 - 1), (2**62 + 12345, 0x123456789ABCDEF0)):
        words = philox_by_hand([counter & LOW32, counter >> 32, 0, 0], [seed & LOW32, seed >> 32])
        assert [word.item() for word in reference.philox_words(torch.tensor([counter]), seed)] == words


@pytest.mark.parametrize(("seed", "stream", "step"), [(0, 0, 0), (2**64 - 1, 2**32 - 1, 2**32 - 1), (2**32, 5, 7)])
def test_the_reference_draws_as_the_contract_says(seed: int, stream: int, step: int) -> None:
    drawn = reference.stochastic_draws(torch.tensor(PLACES), seed, stream, step)
    assert drawn.tolist() == [draw_by_hand(place, seed, stream, step) for place in PLACES]


@pytest.mark.parametrize("first", [0, 3 * COLUMNS - 9, 4 * COLUMNS - 1, 2**45 - 13])
def test_an_element_goes_up_where_its_draw_says(isa: str, first: int) -> None:
    # 1 + k/65536 of the step to the next bfloat16 goes up where k + r reaches 65536: at k = 65536 - r, not below.
    seed = 2**40 + 77
    needed = 65536 - torch.tensor([draw_by_hand(first + i, seed) for i in range(50)])
    for below, expected in ((0, 1 + 2**-7), (1, 1.0)):
        x = (0x3F800000 + needed - below).to(torch.int32).view(torch.float32)
        low = torch.empty(len(x), dtype=torch.bfloat16)
        ops.cast(x, low, rounding="stochastic", seed=seed, offset=first)
        assert low.unique().tolist() == [expected]


def test_many_seeds_in_turn_are_each_seed_alone(isa: str) -> None:
    # What a thread keeps of one seed is not taken for another's.
    x, low = torch.full((3000,), 1 + 2**-8), torch.empty(3000, dtype=torch.bfloat16)
    for seed in (0, 1, 0, 2**32, 1, 0):
        ops.cast(x, low, rounding="stochastic", seed=seed)
        drawn = reference.stochastic_draws(torch.arange(3000), seed)
        assert torch.equal(low > 1, drawn >= 2**15)


# -- as numbers: of fixed seeds, so that nothing here depends on luck -------------------------------------------------


def draws_table(
    rows: int, columns: slice = slice(None), *, seed: int = 1, stream: int = 0, step: int = 1
) -> torch.Tensor:
    """Draws of some rows and columns, in float64, with mean 0 and variance 1 if they are uniform."""
    drawn = reference.stochastic_draws(torch.arange(rows * COLUMNS).view(rows, COLUMNS)[:, columns], seed, stream, step)
    return (drawn.double() - (2**16 - 1) / 2) / ((2**32 - 1) / 12) ** 0.5


def test_draws_are_uniform() -> None:
    n = 256 * COLUMNS
    drawn = reference.stochastic_draws(torch.arange(n), 3)
    for shift in range(16):
        share = float((drawn >> shift & 1).double().mean())
        assert abs(share - 0.5) < FIVE * 0.5 / n**0.5, shift
    counts = torch.bincount(drawn >> 8, minlength=256).double()
    chi_square = float(((counts - n / 256) ** 2 / (n / 256)).sum())
    assert abs(chi_square - 255) < FIVE * (2 * 255) ** 0.5


def test_pairs_are_not_correlated() -> None:
    here = draws_table(256)
    pairs = {f"{d} columns on": (here[:, d:], here[:, :-d]) for d in (1, 2, 3, 4, 64, 1024)}
    pairs |= {f"{d} rows on": (here[d:], here[:-d]) for d in (1, 2, 3, 4, 64)}
    pairs |= {"rows and columns on": (here[1:, 1:], here[:-1, :-1])}
    pairs |= {f"{d} steps on": (draws_table(256, step=1 + d), here) for d in (1, 2, 256)}
    pairs |= {f"stream {stream}": (draws_table(256, stream=stream), here) for stream in (1, 2**31)}
    pairs |= {f"seed {seed}": (draws_table(256, seed=seed), here) for seed in (2, 2**32 + 1)}
    for name, (a, b) in pairs.items():
        assert abs(float((a * b).mean())) < FIVE / a.numel() ** 0.5, name


#: Sets of 4096 draws whose sums are looked at, of many seeds or many steps.
SUMS = {
    "two rows, of many seeds": lambda i: draws_table(2, seed=i),
    "two rows, of many steps": lambda i: draws_table(2, step=i),
    "eight columns of 512 rows, of many seeds": lambda i: draws_table(512, slice(40, 48), seed=i),
    "a row over two steps, of many seeds": lambda i: torch.cat([draws_table(1, seed=i, step=s) for s in (1, 2)]),
}


@pytest.mark.parametrize("name", SUMS)
@pytest.mark.parametrize("share", [0.5, 0.1])
def test_errors_add_up_as_independent_ones_do(name: str, share: float) -> None:
    # Rounding's error where `share` of the step remains: it goes up in that share of cases.
    count, edge = 200, (2 * share - 1) * 3**0.5
    sums = torch.tensor([float(((SUMS[name](i) < edge).double() - share).sum()) for i in range(count)])
    expected = 4096 * share * (1 - share)
    assert abs(float(sums.mean())) < FIVE * (expected / count) ** 0.5
    assert abs(float(sums.square().mean()) / expected - 1) < FIVE * (2 / count) ** 0.5


def test_three_corners_are_independent_and_do_not_tell_the_fourth() -> None:
    n = 512
    drawn = reference.stochastic_draws(torch.arange(n * COLUMNS), 5).view(n, COLUMNS)
    corners = [drawn[i::2, j::2].flatten() for i in (0, 1) for j in (0, 1)]
    halves = sum((corner >> 15) << i for i, corner in enumerate(corners))
    count = halves.numel()
    for patterns, size in ((halves & 7, 8), (halves, 16)):
        shares = torch.bincount(patterns, minlength=size).double() / count
        assert float((shares - 1 / size).abs().max()) < FIVE * (1 / size / count) ** 0.5
    # By addition alone the fourth would be c + b - a.
    apart = (corners[0] - corners[1] - corners[2] + corners[3]) & 0xFFFF
    assert float((apart == 0).double().mean()) < 1e-3
    sixteenths = torch.bincount(apart >> 12, minlength=16).double() / count
    assert float((sixteenths - 1 / 16).abs().max()) < 0.005
