"""Benchmarks of the ops against torch's ways to do the same.

Each benchmark is built, checked, measured and dropped before the next, so that peak memory is that of one benchmark.
Bytes are the minimum by the op's contract; probes measure the machine's bandwidth in the same rounds: ``copy`` (out of
place), ``in place`` and ``triad`` (STREAM's).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from npuzero import ops
from npuzero.bench.harness import Benchmark, Effort, Result, check_close, check_equal, run_benchmark
from npuzero.bench.setting import ELEMENTS, OWN, QUICK_ELEMENTS, SEED, BenchmarkSetting
from npuzero.bench.shapes import gpt_shapes
from npuzero.bench.suites.lion import benchmark_flat_lion
from npuzero.bench.suites.updates import (
    benchmark_flat_adam,
    benchmark_flat_adam_storage,
    benchmark_flat_adam_tensors,
    benchmark_mixed_step,
)
from npuzero.bench.suites.wires import WIRES
from npuzero.ops.reference import cast as cast_reference
from npuzero.ops.reference import norm as norm_reference
from npuzero.ops.reference import pack as pack_reference

SUITE = "ops"

_WORLD = 8  # ranks; packing scales gradients by its inverse


def _make_wire_tensors(setting: BenchmarkSetting) -> tuple[list[Tensor], list[int], list[Tensor], Tensor]:
    """Return a GPT's tensors, their offsets in a flat bf16 buffer, their views of it, and the buffer."""
    tensors = [setting.random(*shape) for shape in gpt_shapes(setting.elements)]
    ends = torch.tensor([tensor.numel() for tensor in tensors]).cumsum(0).tolist()
    offsets = [0, *ends[:-1]]
    wire = torch.zeros(ends[-1], dtype=torch.bfloat16, device=setting.device)
    places = [wire[at : at + tensor.numel()].view(tensor.shape) for at, tensor in zip(offsets, tensors, strict=True)]
    return tensors, offsets, places, wire


def benchmark_pack(setting: BenchmarkSetting) -> Benchmark:
    """Compare ways to write many fp32 tensors to one flat bf16 buffer, times a scale."""
    tensors, offsets, places, wire = _make_wire_tensors(setting)
    scale = 1 / _WORLD  # a power of two: torch's second rounding is then exact

    def own() -> None:
        ops.pack(tensors, offsets, wire, scale=scale)

    def loop() -> None:
        for place, tensor in zip(places, tensors, strict=True):
            place.copy_(tensor).mul_(scale)

    def cat() -> None:
        wire.copy_(torch.cat([tensor.view(-1) for tensor in tensors]).mul_(scale))

    def check() -> str:
        pack_reference.reference_pack(tensors, places, scale, False)
        want = wire.clone()
        for name, call in ((OWN, own), ("a loop", loop), ("torch.cat", cat)):
            wire.zero_()
            call()
            check_equal(f"pack by {name}", wire, want)
        return "every element to the bit against the reference"

    n = wire.numel()
    return Benchmark(
        "pack",
        "pack 400 fp32 tensors to flat bf16, scaled",
        [
            setting.contender("loop of copy_ and mul_", loop, 6, n),
            setting.contender("torch.cat, mul_, copy_", cat, 6, n),
            setting.contender(OWN, own, 6, n),
            *setting.probes("copy"),
        ],
        "loop of copy_ and mul_",
        check,
        {"elements": n, "tensors": len(tensors)},
    )


def benchmark_unpack(setting: BenchmarkSetting) -> Benchmark:
    """Compare ways to write one flat bf16 buffer to many fp32 tensors, times a scale."""
    tensors, offsets, places, wire = _make_wire_tensors(setting)
    wire.copy_(setting.random(wire.numel()))
    scale = 1 / _WORLD

    def own() -> None:
        ops.unpack(wire, tensors, offsets, scale=scale)

    def loop() -> None:
        for place, tensor in zip(places, tensors, strict=True):
            tensor.copy_(place).mul_(scale)

    def check() -> str:
        want = wire.float() * scale
        for name, call in ((OWN, own), ("a loop", loop)):
            for tensor in tensors:
                tensor.zero_()
            call()
            check_equal(f"unpack by {name}", torch.cat([tensor.view(-1) for tensor in tensors]), want)
        return "every element to the bit"

    n = wire.numel()
    return Benchmark(
        "unpack",
        "unpack flat bf16 to 400 fp32 tensors, scaled",
        [
            setting.contender("loop of copy_ and mul_", loop, 6, n),
            setting.contender(OWN, own, 6, n),
            *setting.probes("copy"),
        ],
        "loop of copy_ and mul_",
        check,
        {"elements": n, "tensors": len(tensors)},
    )


def benchmark_cast_nearest(setting: BenchmarkSetting) -> Benchmark:
    """Compare casts of fp32 to bf16, rounding to nearest even."""
    src = setting.random(setting.elements)
    out = torch.empty_like(src, dtype=torch.bfloat16)

    def check() -> str:
        ops.cast(src, out)
        check_equal("cast", out, src.bfloat16())
        return "every element to the bit against copy_"

    return _cast_benchmark(setting, "nearest", "copy_", lambda: out.copy_(src), lambda: ops.cast(src, out), 6, check)


def benchmark_cast_stochastic(setting: BenchmarkSetting) -> Benchmark:
    """Compare stochastically rounded casts of fp32 to bf16."""
    src = setting.random(setting.elements)
    out = torch.empty_like(src, dtype=torch.bfloat16)
    bits = torch.empty_like(src, dtype=torch.int32)

    def passes() -> None:
        bits.random_(0, 1 << 16).add_(src.view(torch.int32)).bitwise_and_(-(1 << 16))
        out.copy_(bits.view(torch.float32))

    def check() -> str:
        part = src[: min(src.numel(), 2**20)]  # the reference takes a hundred bytes per element
        want = torch.empty_like(part, dtype=torch.bfloat16)
        cast_reference.reference_cast(part, want, "stochastic", SEED, 0)
        own()
        check_equal("stochastic cast", out[: part.numel()], want)
        passes()
        check_close("stochastic cast by passes", out, src, tolerance=2.0**-7)
        return f"the first {part.numel()} elements to the bit against the reference"

    def own() -> None:
        ops.cast(src, out, rounding="stochastic", seed=SEED)

    return _cast_benchmark(setting, "stochastic", "random bits added, cut off", passes, own, 6, check)


def benchmark_cast_tf32(setting: BenchmarkSetting) -> Benchmark:
    """Compare casts of fp32 to fp32 with 10 bits of mantissa, out of place."""
    src = setting.random(setting.elements)
    out = torch.empty_like(src)

    def passes() -> None:
        bits = out.view(torch.int32)
        torch.add(src.view(torch.int32), 1 << 12, out=bits)
        bits.bitwise_and_(-(1 << 13))

    def check() -> str:
        want = cast_reference.round_to_tf32(src)
        own()
        check_equal("tf32 cast", out, want)
        passes()
        check_equal("tf32 cast by passes", out, want)
        return "every element to the bit against the reference"

    def own() -> None:
        ops.cast(src, out, rounding="tf32")

    return _cast_benchmark(setting, "tf32", "integer add and mask", passes, own, 8, check)


def _cast_benchmark(
    setting: BenchmarkSetting,
    rounding: str,
    baseline: str,
    passes: Callable[[], object],
    own: Callable[[], object],
    nbytes: int,
    check: Callable[[], str],
) -> Benchmark:
    n = setting.elements
    return Benchmark(
        f"cast/{rounding}",
        "cast fp32 to tf32" if rounding == "tf32" else f"cast fp32 to bf16, {rounding}",
        [
            setting.contender(baseline, passes, nbytes, n),
            setting.contender(OWN, own, nbytes, n),
            *setting.probes("copy"),
        ],
        baseline,
        check,
        {"elements": n},
    )


def benchmark_norm(setting: BenchmarkSetting) -> Benchmark:
    """Compare ways to compute the sum of squares and the number of non-finite elements, in fp32."""
    n = setting.elements
    x = setting.random(n)
    found = torch.zeros(2, dtype=torch.float64, device=setting.device)

    def passes() -> None:
        torch.linalg.vector_norm(x)
        torch.isfinite(x).all()

    def check() -> str:
        want = torch.zeros_like(found)
        norm_reference.reference_norm(x, want)
        ops.norm(x, found)
        check_close("norm", found, want, tolerance=1e-12)
        # torch sums in float32, and its error grows with the number of elements: 0.5 % at 64 M.
        check_close("torch's norm", torch.linalg.vector_norm(x).double(), want[0].sqrt(), tolerance=1e-2)
        return "npuzero's against the reference within 1e-12, torch's within 1e-2"

    return Benchmark(
        "norm",
        "norm and overflow check of fp32",
        [
            setting.contender("torch.linalg.vector_norm", lambda: torch.linalg.vector_norm(x), 4, n),
            setting.contender("vector_norm, isfinite", passes, 4, n),
            setting.contender(OWN, lambda: ops.norm(x, found), 4, n),
            *setting.probes("copy"),
        ],
        "torch.linalg.vector_norm",
        check,
        {"elements": n},
    )


def benchmark_norm_of_sum(setting: BenchmarkSetting) -> Benchmark:
    """Compare ways to add a micro-batch's bf16 gradients to accumulated fp32 ones and take the norm of the sum."""
    n = setting.elements
    # The check zeroes the addend, so that sums stay in range over any number of rounds.
    total, addend = setting.random(n), setting.random(n, dtype=torch.bfloat16)
    found = torch.zeros(2, dtype=torch.float64, device=setting.device)

    def passes() -> None:
        torch.linalg.vector_norm(total.add_(addend, alpha=1 / _WORLD))

    def own() -> None:
        ops.norm(total, found, addend=addend, scale=1 / _WORLD)

    def check() -> str:
        start, found_there = total.clone(), torch.zeros_like(found)
        want = start + addend.float() / _WORLD
        norm_reference.reference_norm(want, found_there)
        passes()
        check_equal("the sum by torch", total, want)
        total.copy_(start)
        own()
        check_equal("the sum by npuzero", total, want)
        check_close("its norm", found, found_there, tolerance=1e-12)
        addend.zero_()
        return "the sum to the bit, its norm within 1e-12"

    return Benchmark(
        "norm/sum",
        "accumulate bf16 into fp32, norm of the sum",
        [
            setting.contender("add_, vector_norm", passes, 10, n),
            setting.contender(OWN, own, 10, n),
            *setting.probes("in place"),
        ],
        "add_, vector_norm",
        check,
        {"elements": n},
    )


#: The builder of each benchmark of the suite, by name.
CASES: dict[str, Callable[[BenchmarkSetting], Benchmark]] = {
    "flat_adam/flat": benchmark_flat_adam,
    "flat_adam/stored": benchmark_flat_adam_storage,
    "flat_adam/400": benchmark_flat_adam_tensors,
    "flat_lion/flat": benchmark_flat_lion,
    "mixed_step": benchmark_mixed_step,
    "pack": benchmark_pack,
    "unpack": benchmark_unpack,
    "cast/nearest": benchmark_cast_nearest,
    "cast/stochastic": benchmark_cast_stochastic,
    "cast/tf32": benchmark_cast_tf32,
    "norm": benchmark_norm,
    "norm/sum": benchmark_norm_of_sum,
    **WIRES,
}


def ops_benchmark_names(quick: bool) -> list[str]:
    """Return every benchmark of the suite."""
    return list(CASES)


def ops_effort(quick: bool) -> Effort:
    """Return the duration of each benchmark of the suite."""
    return Effort.quick() if quick else Effort(most_s=5.0)


def measure_ops(wanted: Sequence[str], device: torch.device, quick: bool) -> Iterator[Result]:
    """Measure the named benchmarks in this process.

    Raises:
        BenchmarkError: a wrong result.
        KernelUnavailable: the device has no kernels.
    """
    setting = BenchmarkSetting(QUICK_ELEMENTS if quick else ELEMENTS, device)
    for name in wanted:
        yield run_benchmark(CASES[name](setting), ops_effort(quick))
