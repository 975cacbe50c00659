"""Calls of every op that reach all of its npu kernel: several tiles, cores, tails and dtypes, in little time."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace

import torch

from npuzero import ops
from npuzero.ops import storage
from npuzero.ops.flat_adam import Segment
from ops import grid

F32, BF16, F16 = grid.FLOATS
CODES = torch.uint8
TILE = 4096
LENGTH = 3 * TILE + 21  # three cores, two tiles for one of them, a tail
ADAMW = Segment(0, 0, 1e-3, 0.9, 0.999, 1e-8, 0.1, 3, decoupled=True, maximize=False, amsgrad=False)
KINDS = (
    ADAMW,
    replace(ADAMW, decoupled=False, step=1),
    replace(ADAMW, amsgrad=True, weight_decay=0.0),
    replace(ADAMW, decoupled=False, amsgrad=True, maximize=True, eps=0.0),
)


def cast() -> None:
    for source, target in itertools.product(grid.FLOATS, repeat=2):
        _cast(source, target, "nearest", 2 * LENGTH)
    _cast(F32, F32, "tf32", 2 * LENGTH)
    _cast(F32, BF16, "away", LENGTH)
    _cast(F32, BF16, "stochastic", LENGTH)


def _cast(source: torch.dtype, target: torch.dtype, rounding: str, n: int) -> None:
    x = grid.Guarded.around(grid.values(n, source), 1).inner
    actual, expected = (grid.Guarded.around(torch.zeros(n, dtype=target), 3) for _ in range(2))
    _compare(
        lambda out: ops.cast(x, out[0].inner, rounding=rounding, seed=2**40 + 3, offset=2**35 - 9), [actual], [expected]
    )


def pack() -> None:
    _pack((101,) * 200, F32, F16, False, False)  # more neighbours in one line of memory than boundaries of 512 bytes
    for source, target, scaled, accumulate in (
        (F32, BF16, True, False),
        (F32, F32, False, False),
        (BF16, F16, False, False),
        (BF16, F32, True, True),
        (F16, BF16, True, True),
        (F32, F32, True, True),
    ):
        _pack((5, 2 * LENGTH, 0, 9, 3 * TILE), source, target, scaled, accumulate)


def _pack(sizes: tuple[int, ...], source: torch.dtype, target: torch.dtype, scaled: bool, accumulate: bool) -> None:
    offsets = [3 + at for at in itertools.accumulate(sizes, initial=0)][:-1]
    tensors = [grid.values(n, source) for n in sizes]
    scale = torch.tensor([0.37]) if scaled else None
    wire = grid.values(sum(sizes) + 9, target)
    actual, expected = (grid.Guarded.around(wire, 1) for _ in range(2))
    _compare(
        lambda out: ops.pack(tensors, offsets, out[0].inner, scale=scale, accumulate=accumulate), [actual], [expected]
    )


def norm() -> None:
    for n, dtype, addend, special in (
        (0, F32, None, False),
        (5, F32, None, False),
        (3 * TILE, F32, None, False),
        (2 * TILE + 21, BF16, None, False),
        (3 * TILE + 777, F32, BF16, False),
        (3 * TILE + 777, F32, F32, True),
        (2 * 131072 + 77, F16, None, True),
        (2 * 131072 + 77, F32, F16, False),
    ):
        x = grid.values(n, dtype, special=special)
        other = None if addend is None else grid.values(n, addend, special=special)
        actual, expected = grid.Guarded.around(x, 16), grid.Guarded.around(x, 16)
        sums = [torch.full((2,), -1.0, dtype=torch.float64) for _ in range(2)]
        ops.norm(actual.inner, sums[0], addend=other, scale=0.37)
        grid.with_reference(lambda x=expected.inner, out=sums[1], o=other: ops.norm(x, out, addend=o, scale=0.37))
        grid.assert_same(actual.inner, expected.inner)
        actual.assert_guards()
        assert sums[0][1] == sums[1][1]
        torch.testing.assert_close(*sums, rtol=2**-40, atol=0, equal_nan=True)


def flat_adam() -> None:
    for dtype, low in ((BF16, BF16), (F32, F16), (F16, None)):
        _adam(LENGTH, dtype, "fp32", low)
    _adam(LENGTH, BF16, "split", None)
    _adam(LENGTH // 2, BF16, "none", None)
    _adam(LENGTH // 2, F32, "split", None, moments=BF16)
    _adam(LENGTH // 2, F32, "fp32", BF16, moments=BF16)
    _adam(LENGTH, BF16, "fp32", BF16, moments=CODES)
    _adam(LENGTH // 2, F32, "none", None, moments=CODES)


def _adam(n: int, dtype: torch.dtype, masters: str, low: torch.dtype | None, *, moments: torch.dtype = F32) -> None:
    coded = moments == CODES  # one value that is not finite spoils a block of 64
    grad = grid.values(n, dtype, special=not coded)
    content = {
        name: grid.values(n, special=not coded) for name in ("master", "exp_avg", "exp_avg_sq", "max_exp_avg_sq")
    }
    for name in ("exp_avg_sq", "max_exp_avg_sq"):  # the larger of 0.0 and -0.0 is whichever comes first
        content[name].abs_()
    if coded:
        _make_special(grad, *content.values())
    for name in tuple(content)[1:]:
        moment = torch.zeros(storage.stored_numel(n, moments), dtype=moments)
        storage.narrow(content[name], moment, signed=name == "exp_avg")
        if coded:
            moment[5120:5248] = moment[n + 80 : n + 82] = 0  # as before the first step
        content[name] = moment
    if low is not None:
        content["low"] = torch.zeros(n, dtype=low)
    if masters != "fp32":
        content["master"], remainder = storage.split(content["master"])
        if masters == "split":
            content["remainder"] = remainder
    actual, expected = ({name: grid.Guarded.around(value, 5) for name, value in content.items()} for _ in range(2))
    ends = [5000, 5032, 6000, n]
    begins = [-(-end // 64) * 64 if coded else end for end in [0, *ends[:-1]]]
    segments = [
        replace(kind, begin=begin, end=max(begin, end), row=(None, 0, 1)[i % 3], stream=2**17 + i, place=8 * i + 2**36)
        for i, (kind, begin, end) in enumerate(zip(KINDS, begins, ends, strict=True))
    ]
    table = torch.tensor([[1e-3, 0.1, 0.9, 70_000.0], [2e-3, 0.2, 0.8, 9.0]])
    options = {"grad_scale": torch.tensor([0.3]), "dynamic": table, "seed": 2**63 + 5}

    def update(buffers: list[grid.Guarded]) -> None:
        named = {name: buffer.inner for name, buffer in zip(content, buffers, strict=True)}
        ops.flat_adam(grad=grad, segments=segments, **named, **options)

    _compare(update, list(actual.values()), list(expected.values()))


def _make_special(grad: torch.Tensor, *states: torch.Tensor) -> None:
    """What few blocks have: not finite, almost so, denormal, zeros of both signs, nothing but zeros."""
    grad[70], grad[140], grad[5300] = torch.inf, torch.nan, -torch.inf
    for x in states:
        x[200], x[300], x[330:340], x[640:1280] = torch.inf, 3.4e38, -0.0, 0.0
        x[400:464] = torch.arange(64) * 2.0**-149
        x[470:480] = x[448:512].abs().max() * 2.0 ** -torch.arange(4.0, 14)  # about the least that are no zero
    grad[330:340], grad[400:464], grad[640:1280] = 0.0, 0.0, 0.0


def _compare(
    call: Callable[[list[grid.Guarded]], None], actual: list[grid.Guarded], expected: list[grid.Guarded]
) -> None:
    call(actual)
    grid.with_reference(lambda: call(expected))
    for one, other in zip(actual, expected, strict=True):
        grid.assert_same(one.inner, other.inner)
        one.assert_guards()


ALL = {"cast": cast, "flat_adam": flat_adam, "norm": norm, "pack": pack}
