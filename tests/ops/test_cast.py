from __future__ import annotations

import itertools

import pytest
import torch

from npuzero import ops
from ops import grid

F32, BF16, F16 = grid.FLOATS
MODES = [("nearest", *pair) for pair in itertools.product(grid.FLOATS, repeat=2)]
MODES += [("tf32", F32, F32), ("stochastic", F32, BF16), ("away", F32, BF16)]


@pytest.mark.parametrize(("rounding", "source", "target"), MODES)
def test_equals_reference_on_the_grid(isa: str, rounding: str, source: torch.dtype, target: torch.dtype) -> None:
    for n, offset in grid.grid_shapes():
        x = grid.GuardedBuffer.around(grid.grid_values(n, source), offset).inner
        actual, expected = (grid.GuardedBuffer.around(torch.zeros(n, dtype=target), offset) for _ in range(2))
        arguments = {"rounding": rounding, "seed": 2**63 + 11, "offset": 2**40 + 5}
        ops.cast(x, actual.inner, **arguments)
        grid.with_reference(lambda x=x, out=expected.inner, kw=arguments: ops.cast(x, out, **kw))
        grid.assert_same(actual.inner, expected.inner, f"{rounding} {n}+{offset}")
        actual.assert_guards()


def test_widening_is_exact_for_every_pattern(isa: str) -> None:
    every = torch.arange(-(2**15), 2**15).to(torch.int16)
    for dtype in (BF16, F16):
        wide = torch.empty(2**16)
        ops.cast(every.view(dtype), wide)
        grid.assert_same(wide, every.view(dtype).float())


@pytest.mark.parametrize("dtype", [BF16, F16])
def test_nearest_at_and_beside_every_middle(isa: str, dtype: torch.dtype) -> None:
    every = torch.arange(-(2**15), 2**15).to(torch.int16).view(dtype).float()
    middles = (every.double() + torch.nextafter(every.to(dtype), torch.tensor(torch.inf, dtype=dtype)).double()) / 2
    near = middles.float()
    below, above = torch.nextafter(near, torch.tensor(-torch.inf)), torch.nextafter(near, torch.tensor(torch.inf))
    x = torch.cat([every, near, below, above])
    actual = torch.empty(len(x), dtype=dtype)
    ops.cast(x, actual)
    grid.assert_same(actual, x.to(dtype))


def test_tf32_ties_go_away_from_zero() -> None:
    ulp = 2.0**-10
    x = torch.tensor([1 + ulp / 2, -1 - ulp / 2, 1 + ulp / 2 - 2**-23, 1 + ulp, 2.0**-149, torch.finfo(F32).max])
    expected = torch.tensor([1 + ulp, -1 - ulp, 1.0, 1 + ulp, 0.0, torch.inf])
    ops.cast(x, x, rounding="tf32")  # in place is legal here
    grid.assert_same(x, expected)


def test_stochastic_depends_on_place_not_on_cut() -> None:
    x = torch.randn(100_001)
    whole, cut = torch.empty(len(x), dtype=BF16), torch.empty(len(x), dtype=BF16)
    ops.cast(x, whole, rounding="stochastic", seed=5, offset=17)
    torch.set_num_threads(1)
    for begin, end in ((0, 3), (3, 40_000), (40_000, 100_001)):
        ops.cast(x[begin:end], cut[begin:end], rounding="stochastic", seed=5, offset=17 + begin)
    assert torch.equal(whole, cut)
    ops.cast(x, cut, rounding="stochastic", seed=6, offset=17)
    assert not torch.equal(whole, cut)


def test_stochastic_keeps_the_mean() -> None:
    n = 1 << 20
    third = 1 + 2**-7 / 3  # a third of the way from 1 to the next bf16
    low = torch.empty(n, dtype=BF16)
    ops.cast(torch.full((n,), third), low, rounding="stochastic", seed=1)
    assert set(low.unique().tolist()) == {1.0, 1 + 2**-7}
    share = (low > 1).double().mean().item()
    assert abs(share - 1 / 3) < 5 * (2 / 9 / n) ** 0.5


def _float32_zeros(n: int = 8) -> torch.Tensor:
    return torch.zeros(n)


_SHARED = torch.zeros(12)

BAD = {
    "no tensor": (lambda: ops.cast([1.0], _float32_zeros()), "cast: src"),
    "integers": (lambda: ops.cast(_float32_zeros().int(), _float32_zeros()), "cast: src"),
    "float64 target": (lambda: ops.cast(_float32_zeros(), _float32_zeros().double()), "cast: dst"),
    "two dimensions": (lambda: ops.cast(torch.zeros(2, 4), _float32_zeros()), "cast: src"),
    "not contiguous": (lambda: ops.cast(torch.zeros(16)[::2], _float32_zeros()), "cast: src"),
    "other length": (lambda: ops.cast(_float32_zeros(8), _float32_zeros(9)), "cast: dst"),
    "other device": (lambda: ops.cast(_float32_zeros(), _float32_zeros().to("meta")), "cast: dst"),
    "sparse": (lambda: ops.cast(_float32_zeros().to_sparse(), _float32_zeros()), "cast: src"),
    "overlap": (lambda: ops.cast(_SHARED[:8], _SHARED[4:]), "cast: dst"),
    "in place": (lambda: ops.cast(_SHARED, _SHARED), "cast: src"),
    "tf32 shifted": (lambda: ops.cast(_SHARED[:8], _SHARED[1:9], rounding="tf32"), "cast: dst"),
    "unknown rounding": (lambda: ops.cast(_float32_zeros(), _float32_zeros(), rounding="up"), "cast: rounding"),
    "stochastic to f16": (
        lambda: ops.cast(_float32_zeros(), _float32_zeros().half(), rounding="stochastic"),
        "cast: dst",
    ),
    "tf32 from bf16": (lambda: ops.cast(_float32_zeros().bfloat16(), _float32_zeros(), rounding="tf32"), "cast: src"),
    "negative seed": (lambda: ops.cast(_float32_zeros(), _float32_zeros(), seed=-1), "cast: seed"),
    "seed too large": (lambda: ops.cast(_float32_zeros(), _float32_zeros(), seed=2**64), "cast: seed"),
    "negative offset": (lambda: ops.cast(_float32_zeros(), _float32_zeros(), offset=-1), "cast: offset"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_arguments_are_refused(name: str) -> None:
    call, subject = BAD[name]
    grid.assert_refused(call, subject)
