"""Test cases of `npuzero check`: a grid of dtypes and options, and special cases that random values hardly hit."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor

from npuzero import _native, ops
from npuzero.ops import storage
from npuzero.ops.reference import quantize as quantize_reference
from npuzero.optim import MOMENT_DTYPES, dynamic_rows
from npuzero.plan import MASTERS, MOMENT_BLOCK

FLOATS = (torch.float32, torch.bfloat16, torch.float16)

#: Put copies a tensor to the op's device; Case runs an op on `numel` elements; Make makes values by dtype and seed.
Put = Callable[[Tensor], Tensor]
Case = Callable[[Put, int], list[Tensor]]
Make = Callable[[int, torch.dtype, int], Tensor]

_BITS = {2: torch.int16, 4: torch.int32}
_SEVERAL_CORES = 2**18 + 17  # elements: an npu's norm uses more than one core


def short_dtype_name(dtype: torch.dtype) -> str:
    """Return a dtype's short name: ``f32``, ``bf16``, ``f16``; others as in torch."""
    return {torch.float32: "f32", torch.bfloat16: "bf16", torch.float16: "f16"}.get(dtype, str(dtype)[6:])


def make_values(numel: int, dtype: torch.dtype, seed: int = 0, *, specials: bool = True) -> Tensor:
    """Make values of many magnitudes; with `specials` every seventh is a zero, denormal, extreme, inf, NaN or tie."""
    generator = torch.Generator().manual_seed(1000 * seed + numel)
    x = torch.randn(numel, generator=generator)
    x = (x * torch.exp2(torch.randint(-12, 9, (numel,), generator=generator).float())).to(dtype)
    if specials:
        info = torch.finfo(dtype)
        extremes = [0.0, -0.0, info.tiny * info.eps, info.tiny, info.max, -info.max, torch.inf, -torch.inf, torch.nan]
        odd = torch.tensor([*extremes, 1 + 2**-8, -1 - 3 * 2**-8, 1 + 2**-11])  # ties of bf16, of f16
        x[::7] = odd.to(dtype)[torch.randint(len(odd), (len(x[::7]),), generator=generator)]
    return x


def check_cases(sizes: Sequence[int]) -> Iterator[tuple[str, Case, Sequence[int]]]:
    """Yield all cases: name, case, and its sizes, which are `sizes` unless the case needs others."""
    for name, case in itertools.chain(_grid_cases(), _special_cases()):
        yield name, case, sizes
    far: dict[str, Make] = {
        "infinities": _make_infinities,
        "two infinities": _make_two_infinities,
        "two infinities and a NaN": _make_infinities_and_nan,
    }
    for dtype, (what, make) in itertools.product(FLOATS, far.items()):
        yield f"norm {short_dtype_name(dtype)}: {what}", partial(_run_norm, dtype, False, make=make), (_SEVERAL_CORES,)


def _cast_kinds() -> Iterator[tuple[str, torch.dtype, torch.dtype, str]]:
    for source, target in itertools.product(FLOATS, FLOATS):
        yield f"cast {short_dtype_name(source)} to {short_dtype_name(target)}", source, target, "nearest"
    yield "cast away from zero", torch.float32, torch.bfloat16, "away"
    yield "cast tf32", torch.float32, torch.float32, "tf32"
    yield "cast stochastic", torch.float32, torch.bfloat16, "stochastic"


def _grid_cases() -> Iterator[tuple[str, Case]]:
    for name, source, target, rounding in _cast_kinds():
        yield name, partial(_run_cast, source, target, rounding)
    for source in FLOATS:
        for target in FLOATS:
            for accumulate in (False, True):
                name = (
                    f"pack {short_dtype_name(source)} {'added to' if accumulate else 'to'} {short_dtype_name(target)}"
                )
                yield name, partial(_run_pack, source, target, accumulate)
    for dtype in FLOATS:
        yield f"norm {short_dtype_name(dtype)}", partial(_run_norm, dtype, False)
        yield f"norm with {short_dtype_name(dtype)} added", partial(_run_norm, dtype, True)
    for dtype, bits in itertools.product(FLOATS, _WIRE_BITS):
        yield f"quantize {short_dtype_name(dtype)} to int{bits}", partial(_run_quantize, dtype, bits)
        yield (
            f"quantize {short_dtype_name(dtype)} to int{bits}, fed back",
            partial(_run_quantize, dtype, bits, fed_back=True),
        )
        yield f"dequantize_sum int{bits} to {short_dtype_name(dtype)}", partial(_run_dequantize_sum, dtype, bits, False)
        yield (
            f"dequantize_sum int{bits} added to {short_dtype_name(dtype)}",
            partial(_run_dequantize_sum, dtype, bits, True),
        )
    for update in (_ADAM, _LION):
        yield from _update_grid_cases(update)
    yield "flat_adam coefficients of lr and step, in float64", _device_coefficients


def _update_grid_cases(update: _UpdateKind) -> Iterator[tuple[str, Case]]:
    for grad in FLOATS:
        for low in (torch.bfloat16, torch.float16, None):
            name = f"{update.op} {short_dtype_name(grad)} to {short_dtype_name(low) if low else 'nothing'}"
            yield name, partial(_run_update, update, grad, low, {})
    for name, options in update.kinds.items():
        yield f"{update.op} {name}", partial(_run_update, update, torch.bfloat16, torch.bfloat16, options)
    for masters, moments in itertools.product(MASTERS, MOMENT_DTYPES):
        yield (
            f"{update.op} with {masters} masters and {moments} moments{update.suffix}",
            _storage_case(update, masters, moments),
        )


def _storage_case(update: _UpdateKind, masters: str, moments: str) -> partial[list[Tensor]]:
    low = torch.bfloat16 if masters == "fp32" else None
    return partial(_run_update, update, torch.bfloat16, low, update.all_moments, masters=masters, moments=moments)


def _special_cases() -> Iterator[tuple[str, Case]]:
    odd: dict[str, Make] = {"NaNs": _make_nans, "infinities": _make_infinities}
    yield from _special_cast_cases(odd)
    yield from _special_pack_cases(odd)
    yield from _special_copy_cases(odd)
    yield from _special_wire_cases(odd)
    yield "flat_adam of many tensors by one launch", _run_many_tensors
    for update in (_ADAM, _LION):
        yield from _special_update_cases(update, odd)


def _special_cast_cases(odd: Mapping[str, Make]) -> Iterator[tuple[str, Case]]:
    for name, source, target, rounding in _cast_kinds():
        if rounding in ("tf32", "away") or (torch.float32 != target != source and rounding == "nearest"):
            yield f"{name}: ties", partial(_run_cast, source, target, rounding, make=_make_ties(target))
        for what, make in odd.items():
            yield f"{name}: {what}", partial(_run_cast, source, target, rounding, make=make)
    for what, place in _PLACES.items():
        yield (
            f"cast stochastic: draws {what}",
            partial(_run_cast, *_F32_TO_BF16, "stochastic", place=place, seed=2**64 - 1),
        )


def _special_pack_cases(odd: Mapping[str, Make]) -> Iterator[tuple[str, Case]]:
    for target in (torch.bfloat16, torch.float16):
        for what, make in {"ties": _make_ties(target), **odd}.items():
            packed = partial(_run_pack, torch.float32, target, False, make=make, scale=1.0)
            yield f"pack f32 to {short_dtype_name(target)}: {what}", packed
    yield "pack f32 added to bf16: infinities", partial(_run_pack, *_F32_TO_BF16, True, make=_make_infinities)


def _special_copy_cases(odd: Mapping[str, Make]) -> Iterator[tuple[str, Case]]:
    for what, make in {"ties": _make_ties(torch.bfloat16), **odd}.items():
        yield f"flat_adam copies to bf16: {what}", partial(_run_rounding_update, torch.bfloat16, make)
        yield f"flat_adam split masters: {what}", partial(_run_rounding_update, None, make)
    for what, make in {"ties": _make_ties(torch.float16), **odd}.items():
        yield f"flat_adam copies to f16: {what}", partial(_run_rounding_update, torch.float16, make)


def _special_wire_cases(odd: Mapping[str, Make]) -> Iterator[tuple[str, Case]]:
    for bits in _WIRE_BITS:
        for what, make in {"ties": _make_half_codes(bits), "denormals": _make_denormals, **odd}.items():
            probe = partial(_run_quantize, torch.float32, bits, make=make, fed_back=what != "ties")
            yield f"quantize f32 to int{bits}: {what}", probe
        for what, make in odd.items():
            yield (
                f"dequantize_sum int{bits} to bf16: {what}",
                partial(_run_dequantize_sum, torch.bfloat16, bits, False, make=make),
            )


def _special_update_cases(update: _UpdateKind, odd: Mapping[str, Make]) -> Iterator[tuple[str, Case]]:
    for masters, moments in (("fp32", "fp32"), ("split", "bf16"), ("none", "int8")):
        stored = _storage_case(update, masters, moments)
        name = f"{update.op} with {masters} masters and {moments} moments"
        for skip in (0.0, 1.0, torch.nan):
            yield f"{name}: skip = {skip:g}", partial(stored, skip=skip)
        for what, make in odd.items():
            yield f"{name}: gradients all {what}", partial(stored, make_grad=make)
        yield f"{name}: coefficients on the device", partial(stored, dynamic=True)
        if moments != "fp32":
            for what, place in _PLACES.items():
                yield f"{name}: draws {what}", partial(stored, place=place, last=True)


_F32_TO_BF16 = (torch.float32, torch.bfloat16)
# Where random counters may go wrong: the sign of 32 bits, their end, the upper word of the row counter, the last place.
_PLACES: dict[str, Callable[[int], int]] = {
    **{f"across 2^{bits}": partial(lambda border, numel: border - numel // 2, 2**bits) for bits in (31, 32, 45)},
    "up to 2^62": lambda numel: 2**62 - 1 - numel,
}


def _make_ties(target: torch.dtype) -> Make:
    """Make values halfway between neighbours of `target` (float32: of tf32), and next to those, up to the largest."""
    return lambda numel, dtype, seed: _repeat_pool(_build_tie_pool(target, dtype), numel, seed)


@cache
def _build_tie_pool(target: torch.dtype, dtype: torch.dtype) -> Tensor:
    if target == torch.float32:
        halfway = (torch.arange(0, 0x7F800000 >> 13, 61, dtype=torch.int32) << 13 | 0x1000).view(torch.float32).double()
    else:
        grid = torch.arange(0x7FFF, dtype=torch.int16).view(target).double()
        grid = grid[grid.isfinite()]
        halfway = torch.cat([(grid[1:] + grid[:-1]) / 2, grid[-1:] + (grid[-1:] - grid[-2:-1]) / 2])
    exact = halfway.to(dtype)
    bits = storage.view_bits(exact[exact.double() == halfway])
    pool = torch.cat([bits - 1, bits, bits + 1]).view(dtype)
    return torch.cat([pool, -pool])


def _make_nans(numel: int, dtype: torch.dtype, seed: int) -> Tensor:
    """Make quiet and signalling NaNs of both signs, with one payload bit (which a cast drops) and with all."""
    infinity = int(storage.view_bits(torch.tensor([torch.inf], dtype=dtype)))
    ones = 2 ** (8 * dtype.itemsize - 1) - 1
    bits = torch.tensor([infinity + 1, infinity + (ones - infinity + 1) // 2, ones])
    return _repeat_pool(torch.cat([bits, bits - ones - 1]).to(_BITS[dtype.itemsize]).view(dtype), numel, seed)


def _make_infinities(numel: int, dtype: torch.dtype, seed: int) -> Tensor:
    return _repeat_pool(torch.tensor([torch.inf, -torch.inf, torch.inf], dtype=dtype), numel, seed)


def _make_two_infinities(numel: int, dtype: torch.dtype, seed: int) -> Tensor:
    """Make finite values except for an infinity at each end: two cores see one each."""
    x = make_values(numel, dtype, seed, specials=False)
    x[0], x[-1] = torch.inf, -torch.inf
    return x


def _make_infinities_and_nan(numel: int, dtype: torch.dtype, seed: int) -> Tensor:
    x = _make_two_infinities(numel, dtype, seed)
    x[numel // 2] = torch.nan
    return x


def _repeat_pool(pool: Tensor, numel: int, seed: int) -> Tensor:
    return pool[(torch.arange(numel) + seed) * 7919 % len(pool)]  # multiplying by a prime visits every value


def _run_cast(
    source: torch.dtype,
    target: torch.dtype,
    rounding: str,
    put: Put,
    numel: int,
    *,
    make: Make = make_values,
    seed: int = 2**40 + 7,
    place: Callable[[int], int] = lambda numel: 3,
) -> list[Tensor]:
    src, dst = put(make(numel, source, 0)), put(torch.zeros(numel, dtype=target))
    ops.cast(src, dst, rounding=rounding, seed=seed, offset=place(numel))
    return [dst]


def _run_pack(
    source: torch.dtype,
    target: torch.dtype,
    accumulate: bool,
    put: Put,
    numel: int,
    *,
    make: Make = make_values,
    scale: float = 0.37,
) -> list[Tensor]:
    parts = [put(make(size, source, seed)) for seed, size in enumerate((numel, 3, numel // 2))]
    offsets = [0, numel + 5, numel + 8]
    wire = put((make if accumulate else make_values)(2 * numel + 11, target, 9))
    ops.pack(parts, offsets, wire, scale=put(torch.tensor([scale])), accumulate=accumulate)
    return [wire]


_finite = partial(make_values, specials=False)


def _run_norm(dtype: torch.dtype, added: bool, put: Put, numel: int, *, make: Make = _finite) -> list[Tensor]:
    """Return the sum as float32: squares are added in another order than in the reference."""
    x = put(make(numel, torch.float32 if added else dtype, 0))
    addend = put(make(numel, dtype, 1)) if added else None
    out = put(torch.zeros(2, dtype=torch.float64))
    ops.norm(x, out, addend=addend, scale=0.5)
    return [out.cpu().float(), *([x] if added else [])]


_WIRE_BITS = {8: 256, 4: 128}  # bits -> elements of a block
_PIECES, _ROWS = 2, 3


def _make_half_codes(bits: int) -> Make:
    """Make values halfway between codes, and the largest code in each block, so that the scale is 4."""
    largest = 2 ** (bits - 1) - 1

    def make(numel: int, dtype: torch.dtype, seed: int) -> Tensor:
        x: Tensor = (torch.arange(numel) * 7919 % (2 * largest) - largest + 0.5) * 4
        x[:: _WIRE_BITS[bits]] = 4 * largest
        return x.to(dtype)

    return make


def _make_denormals(numel: int, dtype: torch.dtype, seed: int) -> Tensor:
    return (make_values(numel, torch.float32, seed, specials=False) * 2.0**-126).to(dtype)


def _make_message(put: Put, nbytes: int) -> Tensor:
    """Return zero bytes aligned as a message requires."""
    room = put(torch.zeros(nbytes + 63, dtype=torch.uint8))
    start = -room.data_ptr() % 64
    return room.narrow(0, start, nbytes)


def _round_up_to_blocks(numel: int, bits: int) -> int:
    """Return the next number of elements that splits into pieces of full blocks."""
    least = _PIECES * _WIRE_BITS[bits]
    return -(-numel // least) * least


def _run_quantize(
    source: torch.dtype, bits: int, put: Put, numel: int, *, make: Make = _finite, fed_back: bool = False
) -> list[Tensor]:
    """Quantize blocks; every other block contains values from `make`."""
    numel = _round_up_to_blocks(numel, bits)
    block = _WIRE_BITS[bits]
    x = _finite(numel, source, 1).view(-1, block)
    x[::2] = make(numel, source, 0).view(-1, block)[::2]
    residual = put(_finite(numel, torch.float32, 2)) if fed_back else None
    message = _make_message(put, _PIECES * _native.message_bytes(numel // _PIECES, bits))
    ops.quantize(put(x.flatten()), message, bits=bits, pieces=_PIECES, residual=residual)
    return [message] if residual is None else [message, residual]


def _run_dequantize_sum(
    target: torch.dtype, bits: int, accumulate: bool, put: Put, numel: int, *, make: Make = _finite
) -> list[Tensor]:
    """Sum messages quantized by the reference. The first block of the first row contains values from `make`."""
    numel = _round_up_to_blocks(numel, bits)
    nbytes = _PIECES * _native.message_bytes(numel // _PIECES, bits)
    sent = []
    for row in range(_ROWS):
        x = _finite(numel, torch.float32, row)
        if row == 0:
            first = slice(_WIRE_BITS[bits])
            x[first] = make(numel, torch.float32, row)[first]
        sent.append(torch.zeros(nbytes, dtype=torch.uint8))
        quantize_reference.reference_quantize(x, sent[-1], bits, _PIECES, None)
    messages = _make_message(put, _ROWS * nbytes)
    messages.copy_(torch.cat(sent))
    out = put(_finite(numel, target, 9))
    ops.dequantize_sum(messages, out, bits=bits, rows=_ROWS, pieces=_PIECES, accumulate=accumulate)
    return [out]


@dataclass(frozen=True)
class _UpdateKind:
    """Describe an update op. `run` takes the moments as one sequence; `segment` begin, end, lr, weight decay, step.

    `signed`: by moment; `kinds`: options by name; `all_moments`: options that use all moments, `suffix` in names.
    """

    op: str
    run: Callable[..., None]
    segment: Callable[..., Any]
    signed: tuple[bool, ...]
    kinds: Mapping[str, Mapping[str, bool]]
    all_moments: Mapping[str, bool]
    suffix: str
    rows: tuple[tuple[float, ...], ...]


def _run_adam(master: Tensor, moments: Sequence[Tensor], *rest: Any, **options: Any) -> None:
    exp_avg, exp_avg_sq, top = moments
    ops.flat_adam(master, exp_avg, exp_avg_sq, *rest, max_exp_avg_sq=top, **options)


def _adam_segment(*fields: float, **options: Any) -> ops.AdamSegment:
    begin, end, lr, weight_decay, step = fields
    options = {"decoupled": True, "maximize": False, "amsgrad": False, **options}
    return ops.AdamSegment(int(begin), int(end), lr, 0.9, 0.99, 1e-8, weight_decay, int(step), **options)


def _run_lion(master: Tensor, moments: Sequence[Tensor], *rest: Any, **options: Any) -> None:
    ops.flat_lion(master, *moments, *rest, **options)


def _lion_segment(*fields: float, **options: Any) -> ops.LionSegment:
    begin, end, lr, weight_decay, step = fields
    return ops.LionSegment(int(begin), int(end), lr, 0.9, 0.99, weight_decay, int(step), **options)


_ADAM = _UpdateKind(
    "flat_adam",
    _run_adam,
    _adam_segment,
    (True, False, False),
    {"l2": {"decoupled": False}, "maximize": {"maximize": True}, "amsgrad": {"amsgrad": True}},
    {"amsgrad": True},
    ", amsgrad",
    ((1e-1, 0.5, 0.99, 1), (1e-2, 0.75, 0.9, 70_000), (1e-3, 1, 1, 2**24)),
)
_LION = _UpdateKind(
    "flat_lion",
    _run_lion,
    _lion_segment,
    (True,),
    {"maximize": {"maximize": True}},
    {},
    "",
    ((1e-1, 0.99, 1), (1e-2, 0.9, 70_000), (1e-3, 1, 2**24)),
)


def _run_update(  # noqa: PLR0913 - everything that a case may vary, by name
    update: _UpdateKind,
    grad: torch.dtype,
    low: torch.dtype | None,
    options: Mapping[str, bool],
    put: Put,
    numel: int,
    *,
    masters: str = "fp32",
    moments: str = "fp32",
    make_grad: Make | None = None,
    skip: float | None = None,
    place: Callable[[int], int] = lambda numel: 0,
    last: bool = False,
    dynamic: bool = False,
) -> list[Tensor]:
    """Run an update. `last`: with the largest streams, steps, seeds; `dynamic`: lr and step terms are on the device."""
    coded = moments == "int8"  # one non-finite value would spoil a block
    make = _finite if coded else make_values
    upper, lower = storage.split_halves(make(numel, torch.float32, 1))
    master = put(make(numel, torch.float32, 1) if masters == "fp32" else upper)
    remainder = put(lower) if masters == "split" else None
    dtype = MOMENT_DTYPES[moments]
    kept = [
        put(_store_moment(make(numel, torch.float32, seed), dtype, signed=signed))
        for seed, signed in zip((2, 3, 4), update.signed, strict=False)
    ]
    gradient, scale = put((make_grad or make)(numel, grad, 5)), put(torch.tensor([0.5]))
    rounded = None if low is None else put(torch.zeros(numel, dtype=low))
    thirds = [bound // MOMENT_BLOCK * MOMENT_BLOCK if coded else bound for bound in (numel // 3, numel // 2)]
    segments = []
    for k, (begin, end) in enumerate(itertools.pairwise([0, *thirds, numel]), 1):
        step, stream = (2**32 - k, 2**31 - k) if last else (k, k)
        named = {"row": k - 1 if dynamic else None, "stream": stream, "place": place(numel) + begin, **options}
        segments.append(update.segment(begin, end, 10.0**-k, 0.1 * k, step, **named))
    table = torch.tensor(update.rows)
    update.run(
        *(master, kept, gradient, segments),
        low=rounded,
        remainder=remainder,
        grad_scale=scale,
        skip=None if skip is None else put(torch.tensor([skip])),
        dynamic=put(table.flatten()).view(table.shape) if dynamic else None,
        seed=2**64 - 1 if last else 7,
    )
    return [tensor for tensor in (master, remainder, *kept, rounded) if tensor is not None]


def _run_many_tensors(put: Put, numel: int) -> list[Tensor]:
    """Update many tensors as for plain parameters: any lengths, gradients of any dtype."""
    numels = (numel, 1, 63, 0, 4097, numel // 3, 512)
    p, m, v = ([put(_finite(n, torch.float32, 10 * i + k)) for k, n in enumerate(numels)] for i in range(3))
    for tensor in v:
        tensor.copy_(tensor.abs())
    grads = [put(_finite(n, FLOATS[k % 3], 30 + k)) for k, n in enumerate(numels)]
    lows = [put(torch.zeros(n, dtype=torch.bfloat16)) if k % 2 else None for k, n in enumerate(numels)]
    bounds = [0, *itertools.accumulate(numels)]
    segments = [
        _adam_segment(begin, end, 10.0**-k, 0.1, k) for k, (begin, end) in enumerate(itertools.pairwise(bounds), 1)
    ]
    ops.flat_adam(p, m, v, grads, segments, low=lows)
    return [*p, *m, *v, *(low for low in lows if low is not None)]


def _run_rounding_update(low: torch.dtype | None, make: Make, put: Put, numel: int) -> list[Tensor]:
    """Run an update that changes nothing, so that masters are only rounded: to `low`, or (None) to two halves."""
    p = make(numel, torch.float32, 0)
    upper, lower = storage.split_halves(p)
    master = put(upper if low is None else p)
    remainder = put(lower) if low is None else None
    rounded = None if low is None else put(torch.zeros(numel, dtype=low))
    m, v, grad = (put(torch.zeros(numel)) for _ in range(3))
    ops.flat_adam(master, m, v, grad, [_adam_segment(0, numel, 1e-3, 0.0, 1)], low=rounded, remainder=remainder)
    return [tensor for tensor in (master, remainder, rounded) if tensor is not None]


def _store_moment(values: Tensor, dtype: torch.dtype, *, signed: bool) -> Tensor:
    """Return a moment in its stored form; an unsigned moment is made non-negative."""
    stored = torch.zeros(storage.stored_numel(values.numel(), dtype), dtype=dtype)
    storage.encode_moment(values if signed else values.abs(), stored, signed=signed)
    return stored


def _device_coefficients(put: Put, numel: int) -> list[Tensor]:
    """Return the coefficients that torch computes on the device, where a scaler counts the steps it let through."""
    steps = put(torch.arange(1.0, 2.0 + min(numel, 5), dtype=torch.float64) ** 4)
    options = {"lr": 1e-3, "betas": (0.9, 0.999), "weight_decay": 0.1, "decoupled_weight_decay": True}
    table = dynamic_rows([options] * steps.numel(), steps.unbind(), steps.device)
    return [table.flatten()]
