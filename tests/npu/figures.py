"""What the npu kernels move and issue, counted in the emulator, beside what the device's rates make of it.

    PYTHONPATH=.:tests python -m npu.figures --out benchmarks/results/npu/counts.json

Counts are exact. Times are arithmetic and no measurement: bytes at 1.6 TB/s; vector instructions at one repeat of 256
bytes a cycle, division and square root at a quarter of that, 1.8 GHz, 48 cores; starting an instruction is not in it.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch

from npu.emulated import Counts, Emulator, build
from npu.exercise import ADAMW, BF16, CODES, F16, F32
from npuzero import _native, ops
from npuzero.ops import storage

CORES, HERTZ, BYTES_PER_SECOND, SLOW = 48, 1.8e9, 1.6e12, 4
NUMEL = CORES * 4 * 4096 + 1001  # several tiles a core, and a tail
PADDED = -(-NUMEL // 512) * 512  # of a flat


def _flat(dtype: torch.dtype, numel: int = NUMEL) -> torch.Tensor:
    """At an address as a device's allocator has them, so that counts do not depend on this machine's."""
    room = torch.ones(numel + 512, dtype=dtype)
    return room[-room.data_ptr() % 512 // room.element_size() :][:numel]


def _adam(
    masters: str,
    grad: torch.dtype,
    low: torch.dtype | None,
    *,
    moments: torch.dtype = F32,
    amsgrad: bool = False,
) -> Callable[[], None]:
    def call() -> None:
        master = F32 if masters == "fp32" else BF16
        named = {"master": _flat(master, PADDED)}
        for name in ("exp_avg", "exp_avg_sq", *["max_exp_avg_sq"] * amsgrad):
            named[name] = _flat(moments, storage.stored_numel(PADDED, moments)).zero_()
        if masters == "split":
            named["remainder"] = _flat(torch.int16, PADDED)
        if low is not None:
            named["low"] = _flat(low, PADDED)
        segment = replace(ADAMW, end=NUMEL, amsgrad=amsgrad)
        scalars = {"grad_scale": torch.ones(1), "skip": torch.zeros(1)}
        ops.flat_adam(grad=_flat(grad, PADDED), segments=[segment], **scalars, **named)

    return call


def _cast(source: torch.dtype, target: torch.dtype, rounding: str = "nearest") -> Callable[[], None]:
    return lambda: ops.cast(_flat(source), _flat(target), rounding=rounding)


def _pack(source: torch.dtype, target: torch.dtype, accumulate: bool) -> Callable[[], None]:
    return lambda: ops.pack([_flat(source)], [0], _flat(target), scale=0.5, accumulate=accumulate)


def _norm(dtype: torch.dtype, addend: torch.dtype | None) -> Callable[[], None]:
    def call() -> None:
        other = None if addend is None else _flat(addend)
        ops.norm(_flat(dtype), torch.empty(2, dtype=torch.float64), addend=other, scale=0.5)

    return call


# What is counted, and the bytes an element that no kernel can do without.
CASES: dict[str, tuple[float, Callable[[], None]]] = {
    "flat_adam bf16 gradient and copy": (28, _adam("fp32", BF16, BF16)),
    "flat_adam f32 gradient, bf16 copy": (30, _adam("fp32", F32, BF16)),
    "flat_adam f32 throughout": (28, _adam("fp32", F32, None)),
    "flat_adam f16 gradient and copy, amsgrad": (36, _adam("fp32", F16, F16, amsgrad=True)),
    "flat_adam split masters, bf16 gradient": (26, _adam("split", BF16, None)),
    "flat_adam bf16 masters, stochastic": (22, _adam("none", BF16, None)),
    "flat_adam bf16 moments, gradient and copy": (20, _adam("fp32", BF16, BF16, moments=BF16)),
    "flat_adam 8-bit moments, bf16 gradient and copy": (16 + 4 / 64, _adam("fp32", BF16, BF16, moments=CODES)),
    "flat_adam 8-bit moments, bf16 masters": (10 + 4 / 64, _adam("none", BF16, None, moments=CODES)),
    "cast f32 to bf16": (6, _cast(F32, BF16)),
    "cast f16 to f32": (6, _cast(F16, F32)),
    "cast bf16 to f16": (4, _cast(BF16, F16)),
    "cast f32 to tf32": (8, _cast(F32, F32, "tf32")),
    "cast f32 to bf16, stochastic": (6, _cast(F32, BF16, "stochastic")),
    "pack f32 to bf16, scaled": (6, _pack(F32, BF16, False)),
    "pack bf16 to bf16, scaled": (4, _pack(BF16, BF16, False)),
    "pack bf16 to f32, scaled and added": (10, _pack(BF16, F32, True)),
    "norm of f32": (4, _norm(F32, None)),
    "norm of bf16": (2, _norm(BF16, None)),
    "norm of f32 + bf16": (10, _norm(F32, BF16)),
}


def count(emulator: Emulator, call: Callable[[], None]) -> Counts:
    """What one call did, on all cores of a device."""
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


def measure() -> dict[str, dict[str, float]]:
    """By case: bytes and repeats an element, and the seconds they take for 1e9 elements."""
    emulator = Emulator(build())
    emulator.schedules, emulator.cores = (0,), CORES
    found = {}
    for name, (least, call) in CASES.items():
        counts = count(emulator, call)
        moved = (counts.loaded + counts.stored) / NUMEL
        cycles = (counts.repeats + SLOW * counts.slow_repeats) / NUMEL
        found[name] = {
            "bytes": moved,
            "least_bytes": least,
            "bytes_per_move": (counts.loaded + counts.stored) / counts.moves,
            "vector_instructions_per_tile": counts.vector_instructions / (NUMEL / 4096),
            "repeats": (counts.repeats + counts.slow_repeats) / NUMEL,
            "ub_bytes": counts.ub_bytes,
            "launches": counts.launches,
            "ms_of_bytes": moved * 1e9 / BYTES_PER_SECOND * 1e3,
            "ms_of_vectors": cycles * 1e9 / (CORES * HERTZ) * 1e3,
        }
    return found


def table(found: dict[str, dict[str, float]]) -> str:
    """As docs/npu.md has it."""
    lines = [
        "| kernel | bytes | the fewest | bytes a move | UB | instructions a tile | ms of bytes | ms of vectors |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for name, row in found.items():
        lines.append(
            f"| {name} | {row['bytes']:.3f} | {row['least_bytes']:g} | {row['bytes_per_move']:,.0f} "
            f"| {row['ub_bytes']:,.0f} | {row['vector_instructions_per_tile']:,.0f} "
            f"| {row['ms_of_bytes']:.1f} | {row['ms_of_vectors']:.1f} |"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="where the counts go, as JSON")
    options = parser.parse_args()
    counted = measure()
    if options.out:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        record = {"numel": NUMEL, "cores": CORES, "emulated": True, "hardware": False, "kernels": counted}
        options.out.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
    print(table(counted))
