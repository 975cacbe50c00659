"""What the npu kernels move and issue, counted in the emulator, beside what the device's rates make of it.

    PYTHONPATH=.:tests python -m npu.figures --out benchmarks/results/npu/counts.json

Counts are exact, of what one more element costs and of what every launch costs. Times are arithmetic and no
measurement, from rates that documentation and public benchmarks give or suggest: bytes at 1.6 TB/s; on each of 48
cores at 1.8 GHz one repeat of 256 bytes a cycle, division and square root four, one more where the two sources of a
repeat meet in a group of UB's banks, STEP cycles for every vector instruction that waits for an earlier one, ACCESS
cycles for every number that the scalar unit reads or writes in UB. What a core moves, computes and reads is taken to
overlap without loss.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from npu.emulated import Emulator, KernelCounts, build_emulated_kernels
from npu.exercise import ADAMW, BF16, CODES, F16, F32, LION
from npuzero import _C, _native, ops
from npuzero.ops import storage

CORES, HERTZ, BYTES_PER_SECOND, NUMEL = 48, 1.8e9, 1.6e12, 10**9
SLOW, STEP, ACCESS = 4, 20, 20  # cycles
SHORT = 131072  # elements of the shorter of two calls on one core, of which the longer one does more of the same


def _aligned_ones(dtype: torch.dtype, numel: int) -> torch.Tensor:
    """At an address as a device's allocator has them, so that counts do not depend on this machine's."""
    room = torch.ones(numel + 512, dtype=dtype)
    return room[-room.data_ptr() % 512 // room.element_size() :][:numel]


Call = Callable[[int], None]  # of a number of elements


def _adam_call(
    masters: str,
    grad: torch.dtype,
    low: torch.dtype | None,
    *,
    moments: torch.dtype = F32,
    amsgrad: bool = False,
) -> Call:
    names = ("exp_avg", "exp_avg_sq", *["max_exp_avg_sq"] * amsgrad)
    return _update_call(ops.flat_adam, replace(ADAMW, amsgrad=amsgrad), names, masters, grad, low, moments)


def _lion_call(masters: str, grad: torch.dtype, low: torch.dtype | None, *, moments: torch.dtype = F32) -> Call:
    return _update_call(ops.flat_lion, LION, ("exp_avg",), masters, grad, low, moments)


def _update_call(
    op: Callable[..., None],
    kind: Any,
    names: Sequence[str],
    masters: str,
    grad: torch.dtype,
    low: torch.dtype | None,
    moments: torch.dtype,
) -> Call:
    def call(n: int) -> None:
        master = F32 if masters == "fp32" else BF16
        named = {"master": _aligned_ones(master, n)}
        for name in names:
            named[name] = _aligned_ones(moments, storage.stored_numel(n, moments)).zero_()
        if masters == "split":
            named["remainder"] = _aligned_ones(torch.int16, n)
        if low is not None:
            named["low"] = _aligned_ones(low, n)
        scalars = {"grad_scale": torch.ones(1), "skip": torch.zeros(1)}
        op(grad=_aligned_ones(grad, n), segments=[replace(kind, end=n)], **scalars, **named)

    return call


def _cast_call(source: torch.dtype, target: torch.dtype, rounding: str = "nearest") -> Call:
    return lambda n: ops.cast(_aligned_ones(source, n), _aligned_ones(target, n), rounding=rounding)


def _pack_call(source: torch.dtype, target: torch.dtype, accumulate: bool) -> Call:
    return lambda n: ops.pack(
        [_aligned_ones(source, n)], [0], _aligned_ones(target, n), scale=0.5, accumulate=accumulate
    )


def _norm_call(dtype: torch.dtype, addend: torch.dtype | None) -> Call:
    def call(n: int) -> None:
        other = None if addend is None else _aligned_ones(addend, n)
        ops.norm(_aligned_ones(dtype, n), torch.empty(2, dtype=torch.float64), addend=other, scale=0.5)

    return call


def _quantize_call(source: torch.dtype, bits: int, fed_back: bool) -> Call:
    def call(n: int) -> None:
        message = _aligned_ones(torch.uint8, _C.message_bytes(n, bits))
        ops.quantize(_aligned_ones(source, n), message, bits=bits, residual=_aligned_ones(F32, n) if fed_back else None)

    return call


def _dequantize_sum_call(target: torch.dtype, bits: int, rows: int, accumulate: bool) -> Call:
    def call(n: int) -> None:
        messages = _aligned_ones(torch.uint8, rows * _C.message_bytes(n, bits))
        ops.dequantize_sum(messages, _aligned_ones(target, n), bits=bits, rows=rows, accumulate=accumulate)

    return call


_WIRE = {8: 1 + 2 / 256, 4: 0.5 + 2 / 128}  # bytes of an element


# What is counted, and the bytes an element that no kernel can do without.
CASES: dict[str, tuple[float, Call]] = {
    "flat_adam bf16 gradient and copy": (28, _adam_call("fp32", BF16, BF16)),
    "flat_adam f32 gradient, bf16 copy": (30, _adam_call("fp32", F32, BF16)),
    "flat_adam f32 throughout": (28, _adam_call("fp32", F32, None)),
    "flat_adam f16 gradient and copy, amsgrad": (36, _adam_call("fp32", F16, F16, amsgrad=True)),
    "flat_adam split masters, bf16 gradient": (26, _adam_call("split", BF16, None)),
    "flat_adam bf16 masters, stochastic": (22, _adam_call("none", BF16, None)),
    "flat_adam bf16 moments, gradient and copy": (20, _adam_call("fp32", BF16, BF16, moments=BF16)),
    "flat_adam 8-bit moments, bf16 gradient and copy": (16 + 4 / 64, _adam_call("fp32", BF16, BF16, moments=CODES)),
    "flat_adam 8-bit moments, bf16 masters": (10 + 4 / 64, _adam_call("none", BF16, None, moments=CODES)),
    "flat_lion bf16 gradient and copy": (20, _lion_call("fp32", BF16, BF16)),
    "flat_lion f32 throughout": (20, _lion_call("fp32", F32, None)),
    "flat_lion split masters, bf16 gradient": (18, _lion_call("split", BF16, None)),
    "flat_lion bf16 masters and moments, stochastic": (10, _lion_call("none", BF16, None, moments=BF16)),
    "flat_lion 8-bit moments, bf16 gradient and copy": (14 + 2 / 64, _lion_call("fp32", BF16, BF16, moments=CODES)),
    "cast f32 to bf16": (6, _cast_call(F32, BF16)),
    "cast f16 to f32": (6, _cast_call(F16, F32)),
    "cast bf16 to f16": (4, _cast_call(BF16, F16)),
    "cast f32 to tf32": (8, _cast_call(F32, F32, "tf32")),
    "cast f32 to bf16, stochastic": (6, _cast_call(F32, BF16, "stochastic")),
    "pack f32 to bf16, scaled": (6, _pack_call(F32, BF16, False)),
    "pack bf16 to bf16, scaled": (4, _pack_call(BF16, BF16, False)),
    "pack bf16 to f32, scaled and added": (10, _pack_call(BF16, F32, True)),
    "norm of f32": (4, _norm_call(F32, None)),
    "norm of bf16": (2, _norm_call(BF16, None)),
    "norm of f32 + bf16": (10, _norm_call(F32, BF16)),
    "quantize bf16 to 8 bits": (2 + _WIRE[8], _quantize_call(BF16, 8, False)),
    "quantize bf16 to 4 bits": (2 + _WIRE[4], _quantize_call(BF16, 4, False)),
    "quantize f32 to 4 bits, fed back": (12 + _WIRE[4], _quantize_call(F32, 4, True)),
    "dequantize_sum of 8 bits to bf16": (2 + _WIRE[8], _dequantize_sum_call(BF16, 8, 1, False)),
    "dequantize_sum of 8 rows of 4 bits to f32": (4 + 8 * _WIRE[4], _dequantize_sum_call(F32, 4, 8, False)),
    "dequantize_sum of 2 rows of 8 bits, added to f32": (8 + 2 * _WIRE[8], _dequantize_sum_call(F32, 8, 2, True)),
}


def count_kernel_work(emulator: Emulator, call: Callable[[], None]) -> KernelCounts:
    """What one call did."""
    kept = {name: getattr(_native, name) for name in emulator.functions()}
    for name, function in emulator.functions().items():
        setattr(_native, name, function)
    try:
        emulator.counts()
        call()
        return emulator.counts()
    finally:
        for name, function in kept.items():
            setattr(_native, name, function)


def _vector_cycles(counts: KernelCounts) -> int:
    return counts.repeats + SLOW * counts.slow_repeats + counts.conflicts + STEP * counts.steps


def _scalar_cycles(counts: KernelCounts) -> int:
    return ACCESS * counts.scalar_accesses


def _moved_bytes(counts: KernelCounts) -> int:
    return counts.loaded + counts.stored


def measure_kernel_figures(names: Collection[str] = tuple(CASES)) -> dict[str, dict[str, float]]:
    """By case: what an element takes, what a core does besides in every launch, and milliseconds of 1e9 elements."""
    emulator = Emulator(build_emulated_kernels())
    emulator.schedules, emulator.cores = (0,), 1
    found = {}
    for name in names:
        least, call = CASES[name]
        short, long = (count_kernel_work(emulator, partial(call, n)) for n in (SHORT, 2 * SHORT))

        def each(what: Callable[[KernelCounts], int], short: KernelCounts = short, long: KernelCounts = long) -> float:
            return (what(long) - what(short)) / SHORT

        def once(what: Callable[[KernelCounts], int], short: KernelCounts = short, long: KernelCounts = long) -> float:
            return 2 * what(short) - what(long)

        cycle = NUMEL / (CORES * HERTZ) * 1e3
        times = {
            "ms_of_bytes": each(_moved_bytes) * NUMEL / BYTES_PER_SECOND * 1e3,
            "ms_of_vectors": each(_vector_cycles) * cycle,
            "ms_of_scalars": each(_scalar_cycles) * cycle,
        }
        ms = max(times.values())
        found[name] = {
            "bytes": each(_moved_bytes),
            "least_bytes": least,
            "bytes_per_move": _moved_bytes(long) / long.moves,
            "ub_bytes": long.ub_bytes,
            "launches": long.launches,
            "vector_instructions_per_4096": each(lambda counts: counts.vector_instructions) * 4096,
            "steps_per_4096": each(lambda counts: counts.steps) * 4096,
            "scalar_accesses_per_4096": each(lambda counts: counts.scalar_accesses) * 4096,
            "repeats": each(lambda counts: counts.repeats + counts.slow_repeats),
            "conflicts": each(lambda counts: counts.conflicts),
            **times,
            "ms": ms,
            "share_of_hbm": times["ms_of_bytes"] / ms,
            "us_of_a_launch": (once(_vector_cycles) + once(_scalar_cycles)) / HERTZ * 1e6,
        }
    return found


def format_kernel_table(found: dict[str, dict[str, float]]) -> str:
    """As docs/npu.md has it."""
    lines = [
        "| kernel | bytes | the fewest | bytes a move | UB | instructions | steps | conflicts "
        "| ms of bytes | of vectors | of scalars | share of HBM |",
        "|---" * 12 + "|",
    ]
    for name, row in found.items():
        lines.append(
            f"| {name} | {row['bytes']:.3f} | {row['least_bytes']:g} | {row['bytes_per_move']:,.0f} "
            f"| {row['ub_bytes']:,.0f} | {row['vector_instructions_per_4096']:,.0f} | {row['steps_per_4096']:,.0f} "
            f"| {row['conflicts'] / row['repeats']:.0%} | {row['ms_of_bytes']:.1f} | {row['ms_of_vectors']:.1f} "
            f"| {row['ms_of_scalars']:.1f} | {row['share_of_hbm']:.2f} |"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="where the counts go, as JSON")
    options = parser.parse_args()
    counted = measure_kernel_figures()
    if options.out:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        record = {
            "numel": NUMEL,
            "cores": CORES,
            "hertz": HERTZ,
            "bytes_per_second": BYTES_PER_SECOND,
            "cycles": {"division": SLOW, "step": STEP, "scalar_access": ACCESS},
            "emulated": True,
            "hardware": False,
            "kernels": counted,
        }
        options.out.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
    print(format_kernel_table(counted))
