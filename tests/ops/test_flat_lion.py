from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from npuzero import _native, ops
from npuzero.ops import LionSegment, storage
from ops import flat, grid
from ops.flat import BF16, F16, F32, STORED

BASE = LionSegment(0, 0, 1e-3, 0.9, 0.99, 0.1, 3)
KINDS = [
    BASE,
    replace(BASE, weight_decay=0.0, step=1),
    replace(BASE, maximize=True, beta1=0.0, beta2=0.5),
    replace(BASE, lr=0.05, step=100_000),
    replace(BASE, lr=0.0),
]
LION = flat.UpdateOp(ops.flat_lion, {"exp_avg": True}, KINDS)


@pytest.mark.parametrize("low", [None, BF16, F16])
@pytest.mark.parametrize("dtype", grid.FLOATS)
def test_equals_reference_on_the_grid(isa: str, dtype: torch.dtype, low: torch.dtype | None) -> None:
    LION.assert_grid(dtype, low)


@pytest.mark.parametrize(("masters", "moments"), STORED)
def test_equals_reference_however_it_is_stored(isa: str, masters: str, moments: str) -> None:
    LION.assert_stored(masters, moments)


def paper_lion_step(
    p: torch.Tensor, m: torch.Tensor, g: torch.Tensor, k: LionSegment
) -> tuple[torch.Tensor, torch.Tensor]:
    """The paper's Algorithm 2, in the dtype that comes."""
    update = (k.beta1 * m + (1 - k.beta1) * g).sign()
    return p * (1 - k.lr * k.weight_decay) - k.lr * update, k.beta2 * m + (1 - k.beta2) * g


@pytest.mark.parametrize("maximize", [False, True])
@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
def test_follows_the_paper_over_twenty_steps(weight_decay: float, maximize: bool) -> None:
    n = 5000
    master, exp_avg = torch.randn(n), torch.zeros(n)
    p, m = master.double(), exp_avg.double()
    for step in range(1, 21):
        grad = torch.randn(n)
        kind = replace(BASE, end=n, lr=1e-2, weight_decay=weight_decay, step=step, maximize=maximize)
        p, m = paper_lion_step(p, m, -grad.double() if maximize else grad.double(), kind)
        ops.flat_lion(master, exp_avg, grad, [kind])
    assert (master - p).abs().max() <= 1e-6 * p.abs().max()
    assert (exp_avg - m).abs().max() <= 1e-6 * m.abs().max()


def test_zero_stays_zero_and_what_is_no_number_is_told(isa: str) -> None:
    p, m = torch.zeros(5), torch.zeros(5)
    grad = torch.tensor([0.0, -0.0, torch.inf, -torch.inf, torch.nan])
    ops.flat_lion(p, m, grad, [replace(BASE, end=5, lr=0.5)])
    assert p[:4].tolist() == [0.0, 0.0, -0.5, 0.5] and p[4].isnan()
    assert m[:4].tolist() == [0.0, 0.0, torch.inf, -torch.inf] and m[4].isnan()


def test_a_row_on_the_device_is_as_good_as_lr_and_step(isa: str) -> None:
    n = 4099
    grad, results = grid.grid_values(n), []
    parts = LION.segments(n)
    table = torch.tensor([[k.lr, 1 - k.lr * k.weight_decay, k.step] for k in parts], dtype=torch.float64).float()
    there = [replace(k, lr=0.0, step=0, row=i) for i, k in enumerate(parts)]
    for backend, chosen in (("native", parts), ("native", there), ("reference", there)):
        _native.use_backend(backend)
        torch.manual_seed(n)
        results.append(LION.stored(n, "none", "bf16"))
        LION(results[-1], grad, chosen, dynamic=table)
    for other in results[1:]:
        for name, item in results[0].items():
            grid.assert_same(other[name].inner, item.inner, name)


def test_halves_make_the_same_bits_as_a_whole(isa: str) -> None:
    LION.assert_halves()


@pytest.mark.parametrize(("masters", "moments"), STORED)
def test_what_is_stored_depends_on_neither_cut_nor_threads(masters: str, moments: str) -> None:
    LION.assert_uncut(masters, moments, replace(BASE, stream=5))


@pytest.mark.parametrize("moments", ["bf16", "int8"])
def test_a_moment_in_few_bits_follows_its_gradients(moments: str) -> None:
    # One step moves it by a hundredth of what little is left; to nearest it would stop on the way.
    n, steps = 4096, 1000
    buffers = LION.stored(n, "fp32", moments)
    storage.encode_moment(torch.ones(n), buffers["exp_avg"].inner, signed=True)
    for step in range(1, steps + 1):
        LION(buffers, torch.full((n,), 0.9), [replace(BASE, end=n, step=step)])
    kept = storage.decode_moment(buffers["exp_avg"].inner, n, signed=True)
    assert abs(float(kept.double().mean()) - 0.9) < 0.002


def test_draws_of_master_and_moment_differ_by_seed_step_stream_and_place() -> None:
    def rounded(seed: int = 0, **changes: int) -> torch.Tensor:
        p, m = torch.ones(4096, dtype=BF16), torch.zeros(4096, dtype=BF16)
        part = replace(BASE, end=4096, lr=1e-3, weight_decay=0.0)
        ops.flat_lion(p, m, torch.full((4096,), 0.3), [replace(part, **changes)], seed=seed)
        return torch.stack([p, m])

    first = rounded()
    assert torch.equal(first, rounded(place=0))
    assert torch.equal(first[:, 8:], rounded(place=8)[:, :-8])
    for other in (rounded(seed=1), rounded(seed=2**32), rounded(step=4), rounded(stream=1)):
        for mine, its in zip(first, other, strict=True):
            assert 0.1 < float((mine != its).float().mean()) < 0.6
    assert abs(float(first[0].float().mean()) - (1 - 1e-3)) < 1e-4  # right on average


def test_uncovered_elements_are_neither_read_nor_written() -> None:
    LION.assert_uncovered_untouched(BASE)


@pytest.mark.parametrize(("flag", "skips"), [(0.0, False), (-0.0, False), (1.0, True), (torch.nan, True)])
def test_skip_leaves_everything_as_it_was(isa: str, flag: float, skips: bool) -> None:
    LION.assert_skip(BASE, flag, skips)


def test_one_call_of_many_tensors_equals_one_call_of_each(isa: str) -> None:
    LION.assert_one_call_of_many_tensors_equals_one_call_of_each()


def test_there_may_be_nothing_to_do() -> None:
    empty, four = (torch.empty(0) for _ in range(3)), [torch.ones(4) for _ in range(3)]
    ops.flat_lion(*empty, [replace(BASE)])
    ops.flat_lion(*four, [])
    ops.flat_lion([], [], [], [])
    ops.flat_lion(*four, [replace(BASE, begin=2, end=2)])
    assert all(torch.equal(buffer, torch.ones(4)) for buffer in four)


def _lion_op_call(n: int = 8, **changes: Any) -> Callable[[], None]:
    arguments: dict[str, Any] = {name: torch.zeros(n) for name in ("master", "exp_avg", "grad")}
    arguments["segments"] = [replace(BASE, end=n)]
    return lambda: ops.flat_lion(**{**arguments, **changes})


def _lion_segment_call(**changes: Any) -> Callable[[], None]:
    return _lion_op_call(segments=[replace(BASE, end=8, **changes)])


_SHARED = torch.zeros(12)
_CODES = torch.zeros(storage.stored_numel(100, torch.uint8), dtype=torch.uint8)

BAD = {
    "no tensor": (_lion_op_call(master=[0.0] * 8), "master[0]"),
    "master in f16": (_lion_op_call(master=torch.zeros(8).half()), "master"),
    "low of bf16 master": (_lion_op_call(master=torch.zeros(8).bfloat16(), low=torch.zeros(8).bfloat16()), "low"),
    "remainder of f32": (_lion_op_call(remainder=torch.zeros(8, dtype=torch.int16)), "remainder"),
    "codes without exponents": (_lion_op_call(exp_avg=torch.zeros(8, dtype=torch.uint8)), "exp_avg"),
    "block cut": (_lion_op_call(100, exp_avg=_CODES, segments=[replace(BASE, begin=32, end=100)]), "segments[0].begin"),
    "moment in float64": (_lion_op_call(exp_avg=torch.zeros(8).double()), "exp_avg"),
    "no moment": (_lion_op_call(exp_avg=[None]), "exp_avg[0]"),
    "fewer moments": (_lion_op_call(exp_avg=[]), "exp_avg"),
    "long gradient": (_lion_op_call(grad=torch.zeros(9)), "grad"),
    "low in float32": (_lion_op_call(low=torch.zeros(8)), "low"),
    "scale of two": (_lion_op_call(grad_scale=torch.ones(2)), "grad_scale"),
    "row of none": (_lion_segment_call(row=0), "segments[0].row"),
    "rows of four": (_lion_op_call(dynamic=torch.ones(2, 4)), "dynamic"),
    "overlap": (_lion_op_call(master=_SHARED[:8], exp_avg=_SHARED[4:]), "exp_avg"),
    "gradient in place": (_lion_op_call(exp_avg=_SHARED[:8], grad=_SHARED[2:10]), "grad"),
    "segment past the end": (_lion_op_call(segments=[replace(BASE, end=9)]), "segments[0]"),
    "segments unordered": (
        _lion_op_call(segments=[replace(BASE, begin=4, end=8), replace(BASE, end=4)]),
        "segments[1]",
    ),
    "step 0": (_lion_segment_call(step=0), "segments[0].step"),
    "beta1 of 1": (_lion_segment_call(beta1=1.0), "segments[0].beta1"),
    "negative beta2": (_lion_segment_call(beta2=-0.1), "segments[0].beta2"),
    "infinite rate": (_lion_segment_call(lr=float("inf")), "segments[0].lr"),
    "negative decay": (_lion_segment_call(weight_decay=-0.1), "segments[0].weight_decay"),
    "stream too large": (_lion_segment_call(stream=2**31), "segments[0].stream"),
    "large seed": (_lion_op_call(seed=2**64), "seed"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_arguments_are_refused(name: str) -> None:
    call, subject = BAD[name]
    grid.assert_refused(call, f"flat_lion: {subject}")


def test_masters_may_be_float32_with_a_copy_in_either_half_precision() -> None:
    for dtype in (BF16, F16):
        p, low = torch.tensor([1 + 2**-9, 1 + 2**-8, -(1 + 2**-8)]), torch.zeros(3, dtype=dtype)
        ops.flat_lion(p, torch.zeros(3), torch.zeros(3), [replace(BASE, end=3, weight_decay=0.0)], low=low)
        expected = storage.upper_half(p) if dtype == BF16 else p.half()
        assert torch.equal(low, expected) and p.dtype == F32
