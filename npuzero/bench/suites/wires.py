"""Benchmarks of the quantization ops of thin wires, against torch's operations one by one and a copy.

Bytes per element: source or sum, codes in each row, and twice the residual.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch

from npuzero import _native, ops
from npuzero.bench.harness import Benchmark, check_equal
from npuzero.bench.setting import OWN, BenchmarkSetting
from npuzero.ops.reference import dequantize_sum as sum_reference
from npuzero.ops.reference import quantize as reference

_BLOCK = {8: 256, 4: 128}
_LARGEST = {8: 127, 4: 7}
_NAMES = {torch.float32: "fp32", torch.bfloat16: "bf16"}
_TORCH = "torch, op by op"
_PART = 2**20  # elements compared with the reference, which takes a hundred bytes per element


def benchmark_quantize(dtype: torch.dtype, bits: int, fed_back: bool, setting: BenchmarkSetting) -> Benchmark:
    """Compare ways to quantize a flat buffer in blocks: to the wire's format or (torch) to one byte per code."""
    n = setting.elements
    source = setting.random(n, dtype=dtype)
    message = torch.zeros(_native.message_bytes(n, bits), dtype=torch.uint8, device=setting.device)
    residual = torch.zeros(n, device=setting.device) if fed_back else None

    def own() -> None:
        ops.quantize(source, message, bits=bits, residual=residual)

    def passes() -> None:
        x = (source.float() if residual is None else source + residual).view(-1, _BLOCK[bits])
        scale = x.abs().amax(1, keepdim=True).mul_(1 / _LARGEST[bits])
        codes = (x / scale).round_().to(torch.int8)
        if residual is not None:
            torch.sub(x, codes * scale, out=residual.view(x.shape))

    def check() -> str:
        part = source[: min(n, _PART)]
        want = torch.zeros(_native.message_bytes(part.numel(), bits), dtype=torch.uint8, device=setting.device)
        rest = None if residual is None else torch.zeros_like(part, dtype=torch.float32)
        reference.reference_quantize(part, want, bits, 1, rest)
        own()
        codes = part.numel() * bits // 8
        check_equal("quantize", message[:codes], want[:codes])
        if rest is not None and residual is not None:
            check_equal("its residual", residual[: part.numel()], rest)
        return f"the first {part.numel()} elements to the bit against the reference"

    nbytes = dtype.itemsize * n + n * bits // 8 + 8 * n * fed_back
    name = f"quantize/{_NAMES[dtype]}/int{bits}{'/residual' * fed_back}"
    title = f"quantize {_NAMES[dtype]} to int{bits}{', with residual' * fed_back}"
    return _wire_benchmark(setting, name, title, own, passes, nbytes, check)


def benchmark_dequantize_sum(
    dtype: torch.dtype, bits: int, rows: int, accumulate: bool, setting: BenchmarkSetting
) -> Benchmark:
    """Compare ways to sum rows of messages; torch's reads one byte per code."""
    n = setting.elements
    size = _native.message_bytes(n, bits)
    messages = torch.zeros(rows * size, dtype=torch.uint8, device=setting.device)
    source = setting.random(n)
    for row in range(rows):
        ops.quantize(source, messages[row * size : (row + 1) * size], bits=bits)
    del source
    codes = torch.ones(rows, n // _BLOCK[bits], _BLOCK[bits], dtype=torch.int8, device=setting.device)
    scales = torch.ones(rows, n // _BLOCK[bits], 1, device=setting.device)
    out = torch.zeros(n, dtype=dtype, device=setting.device)

    def own() -> None:
        ops.dequantize_sum(messages, out, bits=bits, rows=rows, accumulate=accumulate)

    def passes() -> None:
        total = codes[0] * scales[0]
        for row in range(1, rows):
            total.addcmul_(codes[row], scales[row])
        out.add_(total.view(-1)) if accumulate else out.copy_(total.view(-1))

    def check() -> str:
        part = min(n, _PART)
        split, blocks = part * bits // 8, part // _BLOCK[bits]
        few = torch.zeros(rows, _native.message_bytes(part, bits), dtype=torch.uint8, device=setting.device)
        whole = messages.view(rows, size)
        few[:, :split] = whole[:, :split]
        few[:, split : split + 2 * blocks] = whole[:, n * bits // 8 : n * bits // 8 + 2 * blocks]
        want = torch.zeros(part, dtype=dtype, device=setting.device)
        sum_reference.reference_dequantize_sum(few.view(-1), want, bits, rows, 1, accumulate)
        out.zero_()
        own()
        check_equal("dequantize_sum", out[:part], want)
        return f"the first {part} elements to the bit against the reference"

    nbytes = rows * n * bits // 8 + dtype.itemsize * n * (1 + accumulate)
    name = f"dequantize_sum/int{bits}/{rows}/{_NAMES[dtype]}{'/accumulate' * accumulate}"
    title = f"{'add' if accumulate else 'sum'} {rows} x int{bits} to {_NAMES[dtype]}"
    return _wire_benchmark(setting, name, title, own, passes, nbytes, check)


def _wire_benchmark(
    setting: BenchmarkSetting,
    name: str,
    title: str,
    own: Callable[[], None],
    passes: Callable[[], None],
    nbytes: int,
    check: Callable[[], str],
) -> Benchmark:
    return Benchmark(
        name,
        title,
        [
            setting.contender(_TORCH, passes, nbytes, 1),
            setting.contender(OWN, own, nbytes, 1),
            *setting.probes("copy"),
        ],
        _TORCH,
        check,
        {"elements": setting.elements},
    )


def _wire_benchmarks() -> dict[str, Callable[[BenchmarkSetting], Benchmark]]:
    made: dict[str, Callable[[BenchmarkSetting], Benchmark]] = {}
    for dtype, name in _NAMES.items():
        for bits in _BLOCK:
            made[f"quantize/{name}/int{bits}"] = partial(benchmark_quantize, dtype, bits, False)
    made["quantize/fp32/int4/residual"] = partial(benchmark_quantize, torch.float32, 4, True)
    for bits, rows, dtype, accumulate in _SUMS:
        name = f"dequantize_sum/int{bits}/{rows}/{_NAMES[dtype]}{'/accumulate' * accumulate}"
        made[name] = partial(benchmark_dequantize_sum, dtype, bits, rows, accumulate)
    return made


# The cases of an all-gather, and of a reduction over 2 and 4 ranks.
_SUMS = (
    (8, 1, torch.bfloat16, False),
    (8, 1, torch.float32, False),
    *((bits, rows, torch.float32, False) for bits in (4, 8) for rows in (2, 4)),
    (4, 2, torch.bfloat16, False),
    (4, 4, torch.bfloat16, False),
    (4, 2, torch.float32, True),
)
#: The builder of each benchmark, by name.
WIRES = _wire_benchmarks()
