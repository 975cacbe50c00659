from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from npuzero import _native, ops
from npuzero.ops import AdamSegment, storage
from npuzero.optim import dynamic_rows
from ops import flat, grid
from ops.flat import BF16, F16, F32, STORED

ADAMW = AdamSegment(0, 0, 1e-3, 0.9, 0.999, 1e-8, 0.1, 3, decoupled=True, maximize=False, amsgrad=False)
KINDS = [
    ADAMW,
    replace(ADAMW, decoupled=False, step=1),
    replace(ADAMW, amsgrad=True, weight_decay=0.0, lr=0.05),
    replace(ADAMW, maximize=True, beta1=0.0, beta2=0.5),
    replace(ADAMW, decoupled=False, amsgrad=True, maximize=True, eps=0.0, step=100_000),
    replace(ADAMW, decoupled=False, weight_decay=0.0, lr=0.0),
]


ADAM = flat.UpdateOp(ops.flat_adam, {"exp_avg": True, "exp_avg_sq": False, "max_exp_avg_sq": False}, KINDS)


@pytest.mark.parametrize("low", [None, BF16, F16])
@pytest.mark.parametrize("dtype", grid.FLOATS)
def test_equals_reference_on_the_grid(isa: str, dtype: torch.dtype, low: torch.dtype | None) -> None:
    ADAM.assert_grid(dtype, low)


@pytest.mark.parametrize(("masters", "moments"), STORED)
def test_equals_reference_however_it_is_stored(isa: str, masters: str, moments: str) -> None:
    ADAM.assert_stored(masters, moments)


@pytest.mark.parametrize("maximize", [False, True])
@pytest.mark.parametrize("amsgrad", [False, True])
@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.Adam])
def test_follows_torch_over_twenty_steps(
    kind: Callable[..., torch.optim.Optimizer], weight_decay: float, amsgrad: bool, maximize: bool
) -> None:
    n = 5000
    parameter = torch.nn.Parameter(torch.randn(n))
    theirs = kind([parameter], lr=1e-2, weight_decay=weight_decay, amsgrad=amsgrad, maximize=maximize, foreach=False)
    master = parameter.detach().clone()
    exp_avg, exp_avg_sq, top = (torch.zeros(n) for _ in range(3))
    flags = {"decoupled": kind is torch.optim.AdamW, "amsgrad": amsgrad, "maximize": maximize}
    for step in range(1, 21):
        grad = torch.randn(n)
        parameter.grad = grad.clone()
        theirs.step()
        segment = replace(ADAMW, end=n, lr=1e-2, weight_decay=weight_decay, step=step, **flags)
        ops.flat_adam(master, exp_avg, exp_avg_sq, grad, [segment], max_exp_avg_sq=top)
    held = theirs.state[parameter]
    pairs = [(master, parameter.detach()), (exp_avg, held["exp_avg"]), (exp_avg_sq, held["exp_avg_sq"])]
    if amsgrad:
        pairs.append((top, held["max_exp_avg_sq"]))
    for mine, other in pairs:
        assert (mine - other).abs().max() <= 1e-6 * other.abs().max()


def test_a_row_on_the_device_is_as_good_as_lr_and_step(isa: str) -> None:
    n = 4099
    grad, results = grid.grid_values(n), []
    parts = ADAM.segments(n)
    options = [{"lr": k.lr, "betas": (k.beta1, k.beta2), "weight_decay": k.weight_decay} for k in parts]
    options[1]["lr"] = torch.tensor(options[1]["lr"], dtype=torch.float64)
    steps = [torch.tensor(float(part.step)) if i % 2 else part.step for i, part in enumerate(parts)]
    kinds = [[{**each, "decoupled_weight_decay": decoupled} for each in options] for decoupled in (False, True)]
    table = torch.cat([dynamic_rows(kind, steps, torch.device("cpu")) for kind in kinds])
    there = [replace(k, lr=0.0, step=0, row=i + len(parts) * k.decoupled) for i, k in enumerate(parts)]
    for backend, chosen in (("native", parts), ("native", there), ("reference", there)):
        _native.use_backend(backend)
        torch.manual_seed(n)
        results.append(ADAM.state(n, BF16))
        ADAM(results[-1], grad, chosen, dynamic=table)
    for other in results[1:]:
        for name, item in results[0].items():
            grid.assert_same(other[name].inner, item.inner, name)


def test_a_row_is_read_when_the_kernel_runs() -> None:
    # Two rows of equal hyper-parameters are two sets of coefficients all the same.
    p, m, v, grad = (torch.ones(8) for _ in range(4))
    parts = [replace(ADAMW, begin=4 * row, end=4 * row + 4, row=row) for row in (0, 1)]
    ops.flat_adam(p, m, v, grad, parts, dynamic=torch.tensor([[0.0, 1.0, 0.5, 1.0], [0.0, 1.0, 0.25, 1.0]]))
    assert p.tolist() == [0.5] * 4 + [0.25] * 4


def test_halves_make_the_same_bits_as_a_whole(isa: str) -> None:
    ADAM.assert_halves()


def test_a_split_is_to_nearest_with_ties_away_and_joins_again() -> None:
    every = torch.arange(-(2**15), 2**15).int() << 16
    x = torch.cat([every + rest for rest in (0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF)]).view(F32)
    upper, rest = storage.split_halves(x)
    grid.assert_same(storage.join_halves(upper, rest), x)
    finite = x.isfinite() & upper.isfinite()
    wide, half = x[finite].double(), upper[finite].double()
    beyond = torch.nextafter(upper[finite], torch.where(wide > half, torch.inf, -torch.inf).bfloat16()).double()
    nearer = (half - wide).abs() < (beyond - wide).abs()
    tied = (half - wide).abs() == (beyond - wide).abs()
    assert (nearer | (tied & (half.abs() > beyond.abs()))).all()
    assert tied.any()
    largest = torch.tensor([3.4e38])
    assert storage.split_halves(largest)[0].isinf() and torch.equal(
        storage.join_halves(*storage.split_halves(largest)), largest
    )


@pytest.mark.parametrize("signed", [False, True])
@pytest.mark.parametrize("exponent", [16, 17, 100, 127, 253, 254])
def test_every_code_comes_back(signed: bool, exponent: int) -> None:
    codes = torch.arange(256, dtype=torch.uint8)
    for largest in (0xFF, 0xE0, 0x7F) if not signed else (0x7F, 0x60):  # in blocks whose largest value is lower, too
        kept = codes.clamp(max=largest) if not signed else codes & 0x80 | (codes & 0x7F).clamp(max=largest)
        stored = torch.cat([kept, torch.full((4,), exponent, dtype=torch.uint8)])
        value = storage.decode_moment(stored, 256, signed=signed)
        again = torch.zeros_like(stored)
        storage.encode_moment(value, again, signed=signed)
        grid.assert_same(storage.decode_moment(again, 256, signed=signed), value)


def test_codes_are_near_and_no_second_moment_becomes_zero() -> None:
    x = torch.randn(64_000).square() * torch.exp2(torch.randint(-30, 30, (1000, 1)).float()).expand(1000, 64).flatten()
    x[::64] *= 1e-30
    stored = torch.zeros(storage.stored_numel(len(x), torch.uint8), dtype=torch.uint8)
    storage.encode_moment(x, stored, signed=False)
    value = storage.decode_moment(stored, len(x), signed=False)
    assert ((value == 0) == (x == 0)).all()
    near = x >= 2.0**-14 * x.view(1000, 64).amax(1).repeat_interleave(64)
    assert ((value - x).abs() <= x * 2.0**-5)[near].all() and near.float().mean() > 0.9
    storage.encode_moment(-x.sqrt(), stored, signed=True)
    value = storage.decode_moment(stored, len(x), signed=True)
    near = x >= 2.0**-12 * x.view(1000, 64).amax(1).repeat_interleave(64)
    assert ((value + x.sqrt()).abs() <= x.sqrt() * 2.0**-5)[near].all() and near.float().mean() > 0.9


def test_a_block_with_an_infinity_is_lost_and_no_other() -> None:
    x = torch.ones(192)
    x[70] = torch.inf
    stored = torch.zeros(195, dtype=torch.uint8)
    storage.encode_moment(x, stored, signed=True)
    assert storage.decode_moment(stored, 192, signed=True).isnan().nonzero().flatten().tolist() == list(range(64, 128))


@pytest.mark.parametrize(("masters", "moments"), STORED)
def test_what_is_stored_depends_on_neither_cut_nor_threads(masters: str, moments: str) -> None:
    ADAM.assert_uncut(masters, moments, replace(ADAMW, stream=5, amsgrad=True))


@pytest.mark.parametrize("moments", ["bf16", "int8"])
def test_a_second_moment_in_few_bits_follows_its_gradients(moments: str) -> None:
    # One step moves it by a thousandth; to nearest it would stay where it is. Gradients shrink to a tenth.
    n, steps = 4096, 1500
    buffers = ADAM.stored(n, "fp32", moments)
    exact = torch.ones(n)
    for name, item in buffers.items():
        if name != "master":
            storage.encode_moment(torch.ones(n), item.inner, signed=name == "exp_avg")
    for step in range(1, steps + 1):
        grad = torch.randn(n) * 0.1
        exact = 0.999 * exact + 0.001 * grad.square()
        ADAM(buffers, grad, [replace(ADAMW, end=n, step=step)])
    kept = storage.decode_moment(buffers["exp_avg_sq"].inner, n, signed=False)
    assert abs(float(kept.double().mean() / exact.double().mean()) - 1) < 0.02
    assert float((kept / exact - 1).abs().mean()) < 0.25


def test_draws_differ_by_seed_step_stream_and_place() -> None:
    def rounded(seed: int = 0, **changes: int) -> torch.Tensor:
        p, m, v = torch.ones(4096, dtype=BF16), torch.zeros(4096), torch.zeros(4096)
        part = replace(ADAMW, end=4096, lr=1e-3, weight_decay=0.0, beta1=0.0, beta2=0.0)
        ops.flat_adam(p, m, v, torch.ones(4096), [replace(part, **changes)], seed=seed)
        return p

    first = rounded()
    assert torch.equal(first, rounded(place=0))
    assert torch.equal(first[8:], rounded(place=8)[:-8])
    for other in (rounded(seed=1), rounded(seed=2**32), rounded(step=4), rounded(stream=1)):
        assert 0.1 < float((first != other).float().mean()) < 0.5
    assert abs(float(first.float().mean()) - (1 - 1e-3)) < 1e-4  # right on average


def test_uncovered_elements_are_neither_read_nor_written() -> None:
    ADAM.assert_uncovered_untouched(ADAMW)


@pytest.mark.parametrize(("flag", "skips"), [(0.0, False), (-0.0, False), (1.0, True), (torch.nan, True)])
def test_skip_leaves_everything_as_it_was(isa: str, flag: float, skips: bool) -> None:
    ADAM.assert_skip(ADAMW, flag, skips)


def test_one_call_of_many_segments_equals_many_calls_on_any_number_of_threads() -> None:
    n, count = 450_000, 450
    parts = [
        replace(KINDS[i % len(KINDS)], begin=i * 1000 + i % 3, end=(i + 1) * 1000 - i % 2, step=1 + i)
        for i in range(count)
    ]
    grad, results = torch.randn(n), []
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        torch.manual_seed(1)
        results.append(ADAM.state(n, BF16))
        ADAM(results[-1], grad, parts)
    torch.manual_seed(1)
    results.append(ADAM.state(n, BF16))
    for part in parts:
        ADAM(results[-1], grad, [part])
    for other in results[1:]:
        for name, item in results[0].items():
            grid.assert_same(other[name].inner, item.inner, name)


def test_one_call_of_many_tensors_equals_one_call_of_each(isa: str) -> None:
    ADAM.assert_one_call_of_many_tensors_equals_one_call_of_each()


@pytest.mark.parametrize("backend", ["native", "reference"])
def test_segments_are_ranges_of_the_line_of_tensors(backend: str) -> None:
    _native.use_backend(backend)
    p, m, v = ([torch.ones(2, 5), torch.ones(3), torch.ones(0), torch.ones(4)] for _ in range(3))
    grad = [torch.ones_like(tensor) for tensor in p]
    ops.flat_adam(p, m, v, grad, [replace(ADAMW, begin=9, end=12), replace(ADAMW, begin=14, end=15)])
    line = torch.cat([tensor.flatten() for tensor in p])
    assert (line != 1).nonzero().flatten().tolist() == [9, 10, 11, 14]


def test_there_may_be_nothing_to_do() -> None:
    empty, four = (torch.empty(0) for _ in range(4)), [torch.ones(4) for _ in range(4)]
    ops.flat_adam(*empty, [replace(ADAMW)])
    ops.flat_adam(*four, [])
    ops.flat_adam([], [], [], [], [])
    ops.flat_adam(*four, [replace(ADAMW, begin=2, end=2)])
    assert all(torch.equal(buffer, torch.ones(4)) for buffer in four)


def _adam_op_call(n: int = 8, **changes: Any) -> Callable[[], None]:
    arguments: dict[str, Any] = {name: torch.zeros(n) for name in ("master", "exp_avg", "exp_avg_sq", "grad")}
    arguments["segments"] = [replace(ADAMW, end=n)]
    return lambda: ops.flat_adam(**{**arguments, **changes})


def _adam_segment_call(**changes: Any) -> Callable[[], None]:
    return _adam_op_call(segments=[replace(ADAMW, end=8, **changes)])


def _block_quantized_moments(n: int) -> list[torch.Tensor]:
    moments = [torch.zeros(storage.stored_numel(n, torch.uint8), dtype=torch.uint8) for _ in range(2)]
    return [torch.zeros(n), *moments, torch.zeros(n)]


_SHARED = torch.zeros(12)

BAD = {
    "no tensor": (_adam_op_call(master=[0.0] * 8), "master[0]"),
    "master in f16": (_adam_op_call(master=torch.zeros(8).half()), "master"),
    "low of bf16 master": (_adam_op_call(master=torch.zeros(8).bfloat16(), low=torch.zeros(8).bfloat16()), "low"),
    "remainder of f32": (_adam_op_call(remainder=torch.zeros(8, dtype=torch.int16)), "remainder"),
    "remainder in f32": (_adam_op_call(master=torch.zeros(8).bfloat16(), remainder=torch.zeros(8)), "remainder"),
    "moments of two dtypes": (_adam_op_call(exp_avg=torch.zeros(8).bfloat16()), "exp_avg_sq"),
    "maximum of another": (_adam_op_call(max_exp_avg_sq=torch.zeros(8).bfloat16()), "max_exp_avg_sq"),
    "codes without exponents": (_adam_op_call(exp_avg=torch.zeros(8, dtype=torch.uint8)), "exp_avg"),
    "block cut": (
        lambda: ops.flat_adam(*_block_quantized_moments(100), [replace(ADAMW, begin=32, end=100)]),
        "segments[0].begin",
    ),
    "negative seed": (_adam_op_call(seed=-1), "seed"),
    "stream too large": (_adam_segment_call(stream=2**31), "segments[0].stream"),
    "negative place": (_adam_segment_call(place=-1), "segments[0].place"),
    "moment in float64": (_adam_op_call(exp_avg=torch.zeros(8).double()), "exp_avg"),
    "integer gradient": (_adam_op_call(grad=torch.zeros(8).int()), "grad"),
    "low in float32": (_adam_op_call(low=torch.zeros(8)), "low"),
    "fewer moments": (_adam_op_call(exp_avg=[]), "exp_avg"),
    "second in float64": (_adam_op_call(master=[torch.zeros(4), torch.zeros(4).double()]), "master[1]"),
    "second too short": (_adam_op_call(master=[torch.zeros(8)], exp_avg=[torch.zeros(7)]), "exp_avg[0]"),
    "low too short": (_adam_op_call(low=torch.zeros(7).bfloat16()), "low"),
    "short moment": (_adam_op_call(exp_avg_sq=torch.zeros(7)), "exp_avg_sq"),
    "long gradient": (_adam_op_call(grad=torch.zeros(9)), "grad"),
    "not contiguous": (_adam_op_call(grad=torch.zeros(16)[::2]), "grad"),
    "other device": (_adam_op_call(grad=torch.zeros(8, device="meta")), "grad"),
    "scale of two": (_adam_op_call(grad_scale=torch.ones(2)), "grad_scale"),
    "integer skip": (_adam_op_call(skip=torch.zeros(1, dtype=torch.int32)), "skip"),
    "row of none": (_adam_segment_call(row=0), "segments[0].row"),
    "row past the end": (
        _adam_op_call(segments=[replace(ADAMW, end=8, row=2)], dynamic=torch.ones(2, 4)),
        "segments[0].row",
    ),
    "rows of three": (_adam_op_call(dynamic=torch.ones(2, 3)), "dynamic"),
    "rows in float64": (_adam_op_call(dynamic=torch.ones(2, 4).double()), "dynamic"),
    "rows that are written": (_adam_op_call(exp_avg=_SHARED[:8], dynamic=_SHARED[4:12].view(2, 4)), "dynamic"),
    "number as scale": (_adam_op_call(grad_scale=2.0), "grad_scale"),
    "overlap": (_adam_op_call(master=_SHARED[:8], exp_avg=_SHARED[4:]), "exp_avg"),
    "gradient in place": (_adam_op_call(exp_avg=_SHARED[:8], grad=_SHARED[2:10]), "grad"),
    "skip inside": (_adam_op_call(exp_avg=_SHARED[:8], skip=_SHARED[7:8]), "skip"),
    "segment past the end": (_adam_op_call(segments=[replace(ADAMW, end=9)]), "segments[0]"),
    "segment backwards": (_adam_op_call(segments=[replace(ADAMW, begin=5, end=4)]), "segments[0]"),
    "negative begin": (_adam_op_call(segments=[replace(ADAMW, begin=-1, end=4)]), "segments[0]"),
    "segments overlap": (
        _adam_op_call(segments=[replace(ADAMW, end=5), replace(ADAMW, begin=4, end=8)]),
        "segments[1]",
    ),
    "segments unordered": (
        _adam_op_call(segments=[replace(ADAMW, begin=4, end=8), replace(ADAMW, end=4)]),
        "segments[1]",
    ),
    "amsgrad without maximum": (_adam_segment_call(amsgrad=True), "segments[0].amsgrad"),
    "step 0": (_adam_segment_call(step=0), "segments[0].step"),
    "beta1 of 1": (_adam_segment_call(beta1=1.0), "segments[0].beta1"),
    "negative beta2": (_adam_segment_call(beta2=-0.1), "segments[0].beta2"),
    "negative eps": (_adam_segment_call(eps=-1e-8), "segments[0].eps"),
    "infinite rate": (_adam_segment_call(lr=float("inf")), "segments[0].lr"),
    "negative decay": (_adam_segment_call(weight_decay=-0.1), "segments[0].weight_decay"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_arguments_are_refused(name: str) -> None:
    call, subject = BAD[name]
    grid.assert_refused(call, f"flat_adam: {subject}")
