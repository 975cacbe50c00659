"""Calls of every op that reach all of its npu kernel: several tiles, cores, tails and dtypes, in little time."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from fractions import Fraction
from typing import Any

import torch

from npuzero import _native, ops
from npuzero.ops import AdamSegment, LionSegment, storage
from ops import grid, wires

F32, BF16, F16 = grid.FLOATS
CODES = torch.uint8
TILE = 4096
SHARE = 131072  # of norm, for which there is a core each
LENGTH = 3 * TILE + 21  # three cores, two tiles for one of them, a tail
ADAMW = AdamSegment(0, 0, 1e-3, 0.9, 0.999, 1e-8, 0.1, 3, decoupled=True, maximize=False, amsgrad=False)
KINDS = (
    ADAMW,
    replace(ADAMW, decoupled=False, step=1),
    replace(ADAMW, amsgrad=True, weight_decay=0.0),
    # The master as it is, the moments the gradient and its square: what is given as a tie is rounded as one.
    replace(ADAMW, lr=0.0, weight_decay=0.0, beta1=0.0, beta2=0.0, amsgrad=True),
    replace(ADAMW, decoupled=False, amsgrad=True, maximize=True, eps=0.0),
)
LION = LionSegment(0, 0, 1e-3, 0.9, 0.99, 0.1, 3)
LIONS = (
    LION,
    replace(LION, weight_decay=0.0, step=1),
    replace(LION, maximize=True),
    # The update follows the gradient alone, the moment is it: zeros of both signs, ties.
    replace(LION, lr=0.0, weight_decay=0.0, beta1=0.0, beta2=0.0),
    replace(LION, lr=0.05, beta1=0.0, beta2=0.5),
)
ENDS = (5000, 5032, 5505, 6016)  # of their ranges, and the end of everything; of codes, one block and a bit, and whole
ROW = 2048  # places that share a word of the draws
# Of the ranges: at 2^45 the rows' counter has a carry. Neighbours have the same four rows, and two of them the same
# stream or the same step.
PLACES = (2**45 - 3000, 2**45 + 5, 2**36 + ROW - 1, 2**36 + 2 * ROW - 7, 2**61 + 1)
STREAMS = (2**17, 2**17, 0, 2**31 - 1, 5)

# Halves of what bf16, f16 and tf32, and codes drop; and the last that is no infinity of each, with what is next to it
# on both sides; and denormals of bf16 and f16 about half of one. In patterns of f32.
_DROPPED = (16, 13, 19)
_EDGES = (
    *(0x7F7FFFFF, 0x7F7F7FFF, 0x7F7F8000, 0x7F7FEFFF, 0x7F7FF000, 0x477FEFFF, 0x477FF000, 0x477FE000),
    *(0x8000, 0x18000, 0x7FFF, 0x8001, 0x7F8000, 0x33000000, 0x33000001, 0x33C00000, 0x387FF000, 0x3FFF),
)
# NaN, by payloads that truncation or a carry would make something else.
_NANS = {F32: (0x7F800001, 0x7FFFFFFF, 0x7F80FFFF, 0x7FC00001), BF16: (0x7F81, 0x7FFF), F16: (0x7C01, 0x7FFF)}


def exercise_values(n: int, dtype: torch.dtype = F32, *, special: bool = True) -> torch.Tensor:
    """As grid.values, and of what these hardly have: ties and, with `special`, the edges of ranges, and NaNs."""
    x = grid.grid_values(n, dtype, special=special)
    bits = grid.bit_patterns(x)
    if dtype == F32:
        for i, dropped in enumerate(_DROPPED):
            bits[i::11] = bits[i::11] >> dropped << dropped | 1 << dropped - 1
    if special:
        odd = torch.tensor([*_NANS[dtype], *_EDGES * (dtype == F32)])
        odd = torch.cat([odd, odd - (1 << 8 * x.element_size() - 1)]).to(bits.dtype)
        places = bits[int(torch.randint(29, ())) :: 29][: len(odd)]
        places.copy_(odd[: len(places)])
    return x


def exercise_cast() -> None:
    for source, target in itertools.product(grid.FLOATS, repeat=2):
        _compare_cast(source, target, "nearest", 2 * LENGTH)
    _compare_cast(F32, F32, "tf32", 2 * LENGTH)
    _compare_cast(F32, BF16, "away", LENGTH)
    _compare_cast(F32, BF16, "stochastic", LENGTH + TILE, 2**35 - 9)
    for offset in (0, 1, 5, ROW - 1, 4 * ROW, 2**45 - ROW - 3, 2**63 - 1 - ROW):
        _compare_cast(F32, BF16, "stochastic", ROW, offset)


def _compare_cast(source: torch.dtype, target: torch.dtype, rounding: str, n: int, offset: int = 0) -> None:
    x = grid.GuardedBuffer.around(exercise_values(n, source), 1).inner
    actual, expected = (grid.GuardedBuffer.around(torch.zeros(n, dtype=target), 3) for _ in range(2))
    _compare_with_reference(
        lambda out: ops.cast(x, out[0].inner, rounding=rounding, seed=2**40 + 3 + offset % 2, offset=offset),
        [actual],
        [expected],
    )
    if source == target and rounding == "nearest":
        assert torch.equal(grid.bit_patterns(actual.inner), grid.bit_patterns(x)), "a copy changes no NaN either"


def exercise_pack() -> None:
    _compare_pack(
        (101,) * 200, F32, F16, False, False
    )  # more neighbours in one line of memory than boundaries of 512 bytes
    for source, target, scaled, accumulate in (
        (F32, BF16, True, False),
        (F32, F32, False, False),
        (BF16, F16, False, False),
        (BF16, F32, True, True),
        (F16, BF16, True, True),
        (F32, F32, True, True),
    ):
        _compare_pack((5, 2 * LENGTH, 0, 9, 3 * TILE), source, target, scaled, accumulate)


def _compare_pack(
    sizes: tuple[int, ...], source: torch.dtype, target: torch.dtype, scaled: bool, accumulate: bool
) -> None:
    offsets = [3 + at for at in itertools.accumulate(sizes, initial=0)][:-1]
    tensors = [exercise_values(n, source) for n in sizes]
    scale = torch.tensor([0.37 if target == F32 else 0.5]) if scaled else None  # half of a tie is one
    wire = exercise_values(sum(sizes) + 9, target)
    actual, expected = (grid.GuardedBuffer.around(wire, 1) for _ in range(2))
    _compare_with_reference(
        lambda out: ops.pack(tensors, offsets, out[0].inner, scale=scale, accumulate=accumulate), [actual], [expected]
    )


def exercise_quantize() -> None:
    for bits, dtype, pieces, blocks, fed_back, offset in (
        (8, F32, 1, 101, True, 16),  # three cores of two tiles, the last of them neither whole nor eight blocks
        (4, BF16, 1, 253, False, 3),
        (8, BF16, 3, 37, False, 3),
        (4, F16, 3, 69, True, 16),
        (8, F16, 2, 3, True, 1),  # residuals that no core shares
        (4, F32, 5, 1, False, 0),
    ):
        n, size = (
            pieces * blocks * wires.BLOCK[bits],
            pieces * wires.expected_message_bytes(blocks * wires.BLOCK[bits], bits),
        )
        x = grid.GuardedBuffer.around(wires.wire_values(n, wires.BLOCK[bits], dtype), 3).inner
        rest = wires.wire_values(n, wires.BLOCK[bits], first=5)
        actual, expected = (
            [
                grid.GuardedBuffer.around(torch.full((size,), 90, dtype=CODES), wires.ALIGNED),
                *[grid.GuardedBuffer.around(rest, offset)] * fed_back,
            ]
            for _ in range(2)
        )

        def run(out: list[grid.GuardedBuffer], x: torch.Tensor = x, bits: int = bits, pieces: int = pieces) -> None:
            rest = out[1].inner if len(out) > 1 else None
            ops.quantize(x, out[0].inner, bits=bits, pieces=pieces, residual=rest)

        _compare_with_reference(run, actual, expected)


def exercise_dequantize_sum() -> None:
    for bits, dtype, rows, pieces, blocks, accumulate, offset in (
        (8, F32, 3, 1, 101, True, 0),
        (4, BF16, 2, 3, 69, True, 16),
        (8, BF16, 1, 3, 37, False, 3),
        (4, F32, 3, 1, 253, False, 0),
        (8, F16, 1, 2, 3, True, 1),
    ):
        n, block = pieces * blocks * wires.BLOCK[bits], wires.BLOCK[bits]
        sent = [wires.wire_values(n, block, first=5 * row) for row in range(rows)]
        made = functools.partial(wires.make_messages, sent, bits, pieces, ops.quantize)
        messages = grid.GuardedBuffer.around(_of_reference(made), wires.ALIGNED).inner
        start = wires.wire_values(n, block, dtype, first=3)
        actual, expected = ([grid.GuardedBuffer.around(start, offset)] for _ in range(2))
        options = {"bits": bits, "rows": rows, "pieces": pieces, "accumulate": accumulate}

        def run(
            out: list[grid.GuardedBuffer], messages: torch.Tensor = messages, options: dict[str, Any] = options
        ) -> None:
            ops.dequantize_sum(messages, out[0].inner, **options)

        _compare_with_reference(run, actual, expected)


def _of_reference(call: Callable[[], torch.Tensor]) -> torch.Tensor:
    found: list[torch.Tensor] = []
    grid.with_reference(lambda: found.append(call()))
    return found[0]


def exercise_norm() -> None:
    for n, dtype, addend, special in (
        (0, F32, None, False),
        (5, F32, None, False),
        (3 * TILE, F32, None, False),
        (2 * TILE + 21, BF16, None, False),
        (3 * TILE + 777, F32, BF16, False),
        (3 * TILE + 777, F32, F32, True),
        (2 * SHARE + 77, F16, None, True),
        (2 * SHARE + 77, F32, F16, False),
        (SHARE - 5000, F32, None, False),  # one core's, though three would have a workspace of as many blocks
    ):
        other = None if addend is None else exercise_values(n, addend, special=special)
        _compare_norm(exercise_values(n, dtype, special=special), other)
    _compare_norm(exercise_values(2 * SHARE + 77, special=False), exercise_values(2 * SHARE + 77, BF16), offset=3)
    for odd in ({}, {5: torch.inf}, {5: -torch.inf, 5001: torch.inf}, {5: torch.nan}, {5: torch.inf, 6: torch.nan}):
        _compare_norm(_put_values(odd, exercise_values(2 * TILE, special=False)))
    for factor in (2.0**-100, 2.0**100):  # squares that float32 does not have
        _compare_norm(exercise_values(2 * TILE + 5, special=False) * factor)
        _compare_norm(exercise_values(2 * TILE + 5, BF16, special=False) * factor)
    # Over several cores: what is in any of their shares.
    first, last = SHARE // 2, 3 * SHARE - 5
    for odd in ({last: torch.inf}, {first: -torch.inf, last: torch.inf}, {first: torch.nan}, {last: torch.nan}):
        _compare_norm(_put_values(odd, exercise_values(3 * SHARE, BF16, special=False)), misaligned=len(odd))
    _compare_norm(
        _put_values({first: torch.inf, last: torch.nan}, exercise_values(3 * SHARE, special=False)), misaligned=3
    )
    _compare_norm(exercise_values(3 * SHARE, special=False), misaligned=1)
    # Sums of blocks are exact here, and the whole is rounded once, to nearest even.
    for ones, least in ((2, 0.0), (6, 0.0), (2, 2.0**-30), (1, 0.0), (3, 0.0)):
        odd = {0: 2.0**27, 2 * SHARE: least} | {SHARE + i: 1.0 for i in range(ones)}
        exact = sum(Fraction(value) ** 2 for value in odd.values())
        assert float(_compare_norm(_put_values(odd, torch.zeros(3 * SHARE)))[0]) == float(exact)


def _put_values(odd: dict[int, float], x: torch.Tensor) -> torch.Tensor:
    for at, value in odd.items():
        x[at] = value
    return x


def _compare_norm(
    x: torch.Tensor, addend: torch.Tensor | None = None, *, offset: int = 16, misaligned: int = 0
) -> torch.Tensor:
    """What the kernels find, which is what the reference does; the workspace begins so many float64 after a line."""
    actual, expected = grid.GuardedBuffer.around(x, offset), grid.GuardedBuffer.around(x, offset)
    sums = [torch.full((2,), -1.0, dtype=torch.float64) for _ in range(2)]
    blocks = -(-x.numel() // _native.NORM_BLOCK)
    room = torch.empty(2 * blocks + 8, dtype=torch.float64)
    workspace = room[-room.data_ptr() // 8 % 4 + misaligned :][: 2 * blocks]
    views = [_native.tensor_view(tensor) for tensor in (actual.inner, sums[0], workspace)]
    _native.norm(*views, _native.optional_view(addend), 0.37, 0)
    grid.with_reference(lambda: ops.norm(expected.inner, sums[1], addend=addend, scale=0.37))
    grid.assert_same(actual.inner, expected.inner)
    actual.assert_guards()
    assert sums[0][1] == sums[1][1]
    torch.testing.assert_close(*sums, rtol=2**-40, atol=0, equal_nan=True)
    return sums[0]


def exercise_flat_adam() -> None:
    for dtype, low in ((BF16, BF16), (F32, F16), (F16, None)):
        _compare_adam(LENGTH, dtype, "fp32", low)
    _compare_adam(LENGTH, BF16, "split", None)
    _compare_adam(LENGTH // 2, BF16, "none", None)
    _compare_adam(LENGTH // 2, F32, "split", None, moments=BF16)
    _compare_adam(LENGTH, F32, "fp32", BF16, moments=BF16)
    _compare_adam(LENGTH, BF16, "fp32", BF16, moments=CODES)
    _compare_adam(LENGTH // 2, F32, "none", None, moments=CODES)
    _compare_adam(
        700, F32, "fp32", None, moments=CODES
    )  # a core that begins with a tile that is no whole number of blocks
    for skip in (0.0, -0.0, 1.0, -1.0, 0.5, 2.0**-149, torch.inf, torch.nan):
        _compare_adam(700, F32, "fp32", BF16, skip=skip)


def exercise_flat_lion() -> None:
    for dtype, low in ((BF16, BF16), (F32, F16), (F16, None)):
        _compare_lion(LENGTH, dtype, "fp32", low)
    _compare_lion(LENGTH // 2, BF16, "split", None, moments=BF16)
    _compare_lion(LENGTH // 2, F32, "none", None)
    _compare_lion(LENGTH, F32, "fp32", BF16, moments=BF16)
    _compare_lion(LENGTH, BF16, "fp32", BF16, moments=CODES)
    _compare_lion(LENGTH // 2, F32, "none", None, moments=CODES)
    for skip in (0.0, 1.0, torch.nan):
        _compare_lion(700, F32, "fp32", BF16, skip=skip)


_MOMENTS = {"exp_avg": True, "exp_avg_sq": False, "max_exp_avg_sq": False}  # whether with a sign
_ROWS = torch.tensor([[1e-3, 0.1, 0.9, 70_000.0], [2e-3, 0.2, 0.8, ADAMW.step]])


def _compare_adam(n: int, dtype: torch.dtype, masters: str, low: torch.dtype | None, **options: Any) -> None:
    _compare_update(ops.flat_adam, KINDS, _MOMENTS, _ROWS, n, dtype, masters, low, **options)


def _compare_lion(n: int, dtype: torch.dtype, masters: str, low: torch.dtype | None, **options: Any) -> None:
    rows = _ROWS[:, [0, 2, 3]].contiguous()
    _compare_update(ops.flat_lion, LIONS, {"exp_avg": True}, rows, n, dtype, masters, low, **options)


def _compare_update(  # noqa: PLR0913, PLR0917 - the op, and how its buffers are stored
    op: Callable[..., None],
    kinds: Sequence[Any],
    signed: Mapping[str, bool],
    rows: torch.Tensor,
    n: int,
    dtype: torch.dtype,
    masters: str,
    low: torch.dtype | None,
    *,
    moments: torch.dtype = F32,
    skip: float | None = None,
) -> None:
    coded = moments == CODES  # one value that is not finite spoils a block of 64
    grad = exercise_values(n, dtype, special=not coded)
    content = {name: exercise_values(n, special=not coded) for name in ("master", *signed)}
    for name, with_sign in signed.items():
        if not with_sign:  # the larger of 0.0 and -0.0 is whichever comes first
            content[name].abs_()
    if coded and n > ENDS[0]:
        _make_special(grad, *content.values())
    for name, with_sign in signed.items():
        moment = torch.zeros(storage.stored_numel(n, moments), dtype=moments)
        storage.encode_moment(content[name], moment, signed=with_sign)
        if coded:
            moment[5120:5248] = moment[n + 80 : n + 82] = 0  # as before the first step
            if name == "exp_avg":
                moment[n + 85 : n + 86] = 255  # lost, whatever its codes are
        content[name] = moment
    if low is not None:
        content["low"] = torch.zeros(n, dtype=low)
    if masters != "fp32":
        content["master"], remainder = storage.split_halves(content["master"])
        if masters == "split":
            content["remainder"] = remainder
    actual, expected = (
        {name: grid.GuardedBuffer.around(value, 5) for name, value in content.items()} for _ in range(2)
    )
    ends = [min(end, n) for end in (*ENDS, n)]
    begins = [min(-(-end // 64) * 64, n) if coded else end for end in [0, *ends[:-1]]]
    segments = [
        replace(kind, begin=begin, end=max(begin, end), row=(None, 0, 1)[i % 3], stream=STREAMS[i], place=PLACES[i])
        for i, (kind, begin, end) in enumerate(zip(kinds, begins, ends, strict=True))
    ]
    options = {"dynamic": rows, "seed": 2**63 + 5}
    options |= {"grad_scale": torch.tensor([0.25])} if skip is None else {"skip": torch.tensor([skip])}

    def update(buffers: list[grid.GuardedBuffer]) -> None:
        named = {name: buffer.inner for name, buffer in zip(content, buffers, strict=True)}
        op(grad=grad, segments=segments, **named, **options)

    _compare_with_reference(update, list(actual.values()), list(expected.values()))


def _make_special(grad: torch.Tensor, *states: torch.Tensor) -> None:
    """What few blocks have: not finite, almost so, denormal, zeros of both signs, nothing but zeros."""
    for x in (grad, *states):  # the last block is less than what it is filled up with could be
        x[len(x) // 64 * 64 :] *= 2.0**-40
    grad[70], grad[140], grad[5300] = torch.inf, torch.nan, -torch.inf
    for x in states:
        x[200], x[300], x[330:340], x[640:1280] = torch.inf, 3.4e38, -0.0, 0.0
        x[400:464] = torch.arange(64) * 2.0**-149
        x[470:480] = x[448:512].abs().max() * 2.0 ** -torch.arange(4.0, 14)  # about the least that are no zero
    grad[5568:5696] = 1.0  # and largest ones that are about half a unit below the next exponent
    grad[5570], grad[5650] = 1.9375 + 2.0**-23, 1.9375
    grad[330:340], grad[400:464], grad[640:1280] = 0.0, 0.0, 0.0


def _compare_with_reference(
    call: Callable[[list[grid.GuardedBuffer]], None],
    actual: list[grid.GuardedBuffer],
    expected: list[grid.GuardedBuffer],
) -> None:
    call(actual)
    grid.with_reference(lambda: call(expected))
    for one, other in zip(actual, expected, strict=True):
        grid.assert_same(one.inner, other.inner)
        one.assert_guards()


ALL = {
    "cast": exercise_cast,
    "dequantize_sum": exercise_dequantize_sum,
    "flat_adam": exercise_flat_adam,
    "flat_lion": exercise_flat_lion,
    "norm": exercise_norm,
    "pack": exercise_pack,
    "quantize": exercise_quantize,
}
