from __future__ import annotations

import math
import os

import pytest
import torch

from npuzero import _native, ops
from ops import grid

# Relative; without float64 the order of the sum is another (docs/npu.md).
_APART = 2**-40 if os.environ.get("EMULATED_NPU") else 0.0


def norm_into_out(x: torch.Tensor) -> torch.Tensor:
    out = torch.empty(2, dtype=torch.float64)
    ops.norm(x, out)
    return out


@pytest.mark.parametrize("dtype", grid.FLOATS)
def test_equals_reference_on_the_grid(isa: str, dtype: torch.dtype) -> None:
    for n, offset in grid.grid_shapes():
        for special in (False, True):
            x = grid.GuardedBuffer.around(grid.grid_values(n, dtype, special=special), offset).inner
            actual = grid.GuardedBuffer.around(torch.full((2,), -1.0, dtype=torch.float64), offset)
            expected = torch.empty(2, dtype=torch.float64)
            ops.norm(x, actual.inner)
            grid.with_reference(lambda x=x, out=expected: ops.norm(x, out))
            actual.assert_guards()
            assert actual.inner[1] == expected[1]
            torch.testing.assert_close(actual.inner, expected, rtol=_APART, atol=0, equal_nan=True)


@pytest.mark.parametrize("dtype", grid.FLOATS)
def test_adds_before_it_sums(isa: str, dtype: torch.dtype) -> None:
    for n, offset in grid.grid_shapes():
        for special in (False, True):
            x, addend = grid.grid_values(n, special=special), grid.grid_values(n, dtype, special=special)
            actual, expected = grid.GuardedBuffer.around(x, offset), x.clone()
            sums, reference = torch.empty(2, dtype=torch.float64), torch.empty(2, dtype=torch.float64)
            addend = grid.GuardedBuffer.around(addend, offset).inner
            ops.norm(actual.inner, sums, addend=addend, scale=0.37)
            grid.with_reference(
                lambda x=expected, out=reference, a=addend: ops.norm(x, out, addend=a, scale=0.37),
            )
            grid.assert_same(actual.inner, expected, f"{n}+{offset}")
            actual.assert_guards()
            assert sums[1] == reference[1]
            assert torch.equal(sums.nan_to_num(), norm_into_out(actual.inner).nan_to_num())


def test_sum_is_far_more_exact_than_float32() -> None:
    x = grid.grid_values(100_003, special=False)
    exact = math.fsum(value * value for value in x.double().tolist())
    assert abs(norm_into_out(x)[0].item() - exact) <= exact * 2**-45


def test_no_bit_depends_on_threads_isa_or_alignment() -> None:
    x = grid.grid_values(grid.LARGE, special=False)
    expected = norm_into_out(x)
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        for isa in _native.supported_isas():
            _native.use_isa(isa)
            for offset in grid.OFFSETS:
                assert torch.equal(norm_into_out(grid.GuardedBuffer.around(x, offset).inner), expected)


def test_non_finite_elements_are_counted_and_spoil_the_sum() -> None:
    x = torch.ones(50_000)
    x[[3, 49_999]] = torch.inf
    assert norm_into_out(x).tolist() == [torch.inf, 2.0]
    x[40_000] = torch.nan
    total, bad = norm_into_out(x).tolist()
    assert math.isnan(total) and bad == 3.0


_BOTH = torch.zeros(10)
_OUT = torch.zeros(2, dtype=torch.float64)

BAD = {
    "no tensor": (lambda: ops.norm(1.0, _OUT), "norm: x"),
    "float64": (lambda: ops.norm(torch.zeros(4).double(), _OUT), "norm: x"),
    "two dimensions": (lambda: ops.norm(torch.zeros(2, 2), _OUT), "norm: x"),
    "not contiguous": (lambda: ops.norm(torch.zeros(8)[::2], _OUT), "norm: x"),
    "out too long": (lambda: ops.norm(torch.zeros(4), torch.zeros(3).double()), "norm: out"),
    "out in f32": (lambda: ops.norm(torch.zeros(4), torch.zeros(2)), "norm: out"),
    "other device": (lambda: ops.norm(torch.zeros(4), _OUT.to("meta")), "norm: out"),
    "addend to bf16": (lambda: ops.norm(torch.zeros(4).bfloat16(), _OUT, addend=torch.zeros(4)), "norm: x"),
    "short addend": (lambda: ops.norm(torch.zeros(4), _OUT, addend=torch.zeros(3)), "norm: addend"),
    "float64 addend": (lambda: ops.norm(torch.zeros(4), _OUT, addend=torch.zeros(4).double()), "norm: addend"),
    "addend inside x": (lambda: ops.norm(_BOTH[:4], _OUT, addend=_BOTH[2:6]), "norm: addend"),
    "scale of text": (lambda: ops.norm(torch.zeros(4), _OUT, addend=torch.zeros(4), scale="2"), "norm: scale"),
    "overlap": (lambda: ops.norm(_BOTH, _BOTH[2:6].view(torch.float64)), "norm: out"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_arguments_are_refused(name: str) -> None:
    call, subject = BAD[name]
    grid.assert_refused(call, subject)
