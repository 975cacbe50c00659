"""The ops on a GPU, compared with their goals. From the repository's root, or installed::

    python -m benchmarks.cuda --out runs/cuda/ops.json

Benchmarks of `npuzero bench ops` and further ones, at sizes with launches of milliseconds. Shares are relative to a
device-to-device copy (``copy_`` between equal tensors, which is a cudaMemcpyAsync) in the same rounds.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch

from npuzero import _native, ops
from npuzero import device as devices
from npuzero.bench import (
    Benchmark,
    Effort,
    Record,
    Result,
    check_close,
    check_equal,
    machine_fingerprint,
    run_benchmark,
)
from npuzero.bench.setting import OWN, BenchmarkSetting
from npuzero.bench.suites.ops import CASES
from npuzero.bench.suites.updates import ADAM_TOLERANCE, FlatAdamRun
from npuzero.bench.suites.wires import WIRES
from npuzero.cli.bench import render_record
from npuzero.cli.output.table import format_table
from npuzero.ops.reference import cast as cast_reference
from npuzero.ops.reference import dequantize_sum as dequantize_sum_reference
from npuzero.ops.reference import norm as norm_reference
from npuzero.ops.reference import pack as pack_reference
from npuzero.ops.reference import quantize as quantize_reference

COPY, CAT = "copy", "torch.cat, mul_, copy_"
ELEMENTS = 2**29
MOST = 2**24  # elements per call of a reference, which takes many bytes for each
PIECES = 64  # ranks that a thin wire's messages are for
WORDS = {torch.float32: "fp32", torch.bfloat16: "bf16"}

Make = Callable[[BenchmarkSetting], Benchmark]


def cuda_adam_mixed(setting: BenchmarkSetting) -> Benchmark:
    """Compare AdamW on fp32 masters: bf16 gradients in, bf16 parameters out, one flat buffer of twice the elements."""
    n = 2 * setting.elements
    gradient = setting.random(n, dtype=torch.bfloat16).mul_(0.01)
    own = FlatAdamRun(setting.random(n), gradient, torch.empty_like(gradient))

    def check() -> str:
        assert own.low is not None
        own.update()
        for begin in range(0, n, MOST):
            part = slice(begin, begin + MOST)
            want = FlatAdamRun(own.start[part], gradient[part]).expected()
            check_close("flat_adam", own.master[part], want, tolerance=ADAM_TOLERANCE)
            rounded = torch.empty_like(own.low[part])
            cast_reference.reference_cast(own.master[part], rounded, "away", 0, 0)
            check_equal("the rounded parameters", own.low[part], rounded)
        del own.start
        return "all masters after the first step against float64, their rounded copies to the bit"

    title = "AdamW on fp32 masters, bf16 gradients in, bf16 parameters out"
    return _copy_only_benchmark("flat_adam/mixed", title, setting, own.update, 28 * n, n, check)


def cuda_pack_1000(setting: BenchmarkSetting, multiple: int = 8) -> Benchmark:
    """Pack 1,000 fp32 tensors into one bf16 buffer, scaled; random sizes that are multiples of ``multiple``."""
    generator = torch.Generator().manual_seed(1)
    mean = max(2, setting.elements // 2000 // multiple)
    counts = torch.randint(1, 2 * mean, (1000,), generator=generator).mul_(multiple).tolist()
    ends = torch.tensor(counts).cumsum(0).tolist()
    offsets, n = [0, *ends[:-1]], ends[-1]
    tensors = [setting.random(count) for count in counts]
    wire, joined = (torch.zeros(n, dtype=torch.bfloat16, device=setting.device) for _ in range(2))
    scale = 0.125  # a power of two: torch's second rounding is then exact

    def own() -> None:
        ops.pack(tensors, offsets, wire, scale=scale)

    def cat() -> None:
        joined.copy_(torch.cat(tensors).mul_(scale))

    def check() -> str:
        want = torch.empty_like(wire)
        pack_reference.reference_pack(tensors, list(want.split(counts)), scale, False)
        for name, call, result in ((OWN, own, wire), (CAT, cat, joined)):
            call()
            check_equal(f"pack by {name}", result, want)
        return "every element to the bit against the reference"

    return Benchmark(
        "pack/1000" if multiple > 1 else "pack/odd",
        f"pack 1,000 fp32 tensors to bf16, scaled{', of odd sizes, too' * (multiple == 1)}",
        [setting.contender(CAT, cat, 6, n), setting.contender(OWN, own, 6, n), *setting.probes(COPY)],
        CAT,
        check,
        {"elements": n, "tensors": len(tensors)},
    )


def cuda_pack_unaligned(setting: BenchmarkSetting) -> Benchmark:
    """Pack the same to offsets that are mostly unaligned for accesses of several elements."""
    return cuda_pack_1000(setting, multiple=1)


def cuda_cast_away(setting: BenchmarkSetting) -> Benchmark:
    """Cast fp32 to bf16, ties away from zero."""
    source = setting.random(setting.elements)
    target = torch.empty_like(source, dtype=torch.bfloat16)

    def own() -> None:
        ops.cast(source, target, rounding="away")

    def check() -> str:
        own()
        want = torch.empty_like(target)
        cast_reference.reference_cast(source, want, "away", 0, 0)
        check_equal("cast", target, want)
        return "every element to the bit against the reference"

    return _copy_only_benchmark(
        "cast/away", "cast fp32 to bf16, away", setting, own, source.nbytes + target.nbytes, source.numel(), check
    )


def cuda_norm_bf16(setting: BenchmarkSetting) -> Benchmark:
    """Compute the sum of squares of bf16."""
    x = setting.random(setting.elements, dtype=torch.bfloat16)
    found = torch.zeros(2, dtype=torch.float64, device=setting.device)

    def check() -> str:
        want = torch.zeros_like(found)
        norm_reference.reference_norm(x, want)
        ops.norm(x, found)
        check_equal("norm", found, want)
        return "to the bit against the reference"

    return _copy_only_benchmark(
        "norm/bf16", "norm of bf16", setting, lambda: ops.norm(x, found), x.nbytes, x.numel(), check
    )


def cuda_quantize(setting: BenchmarkSetting, bits: int, dtype: torch.dtype, with_residual: bool = False) -> Benchmark:
    """Quantize a buffer to messages for all ranks."""
    n = _round_down_to_blocks(setting.elements)
    source = setting.random(n, dtype=dtype)
    messages = _allocate_messages(n, bits, setting)
    residual = torch.zeros(n, device=setting.device) if with_residual else None

    def own() -> None:
        ops.quantize(source, messages.view(-1), bits=bits, pieces=PIECES, residual=residual)

    def check() -> str:
        own()
        own()  # the residual is not zero here
        want = torch.zeros_like(messages[0])
        for piece, values in zip(messages, source.view(PIECES, -1), strict=True):
            left = torch.zeros(len(values), device=setting.device) if with_residual else None
            for _ in range(2):
                quantize_reference.reference_quantize(values, want, bits, 1, left)
            check_equal("quantize", piece, want)
        return "every message to the bit against the reference"

    name = f"quantize/int{bits}{'/residual' * with_residual}"
    title = f"{WORDS[dtype]} to int{bits} for a wire{', with a residual' * with_residual}"
    moved = messages.nbytes + source.nbytes + (0 if residual is None else 2 * residual.nbytes)
    return _copy_only_benchmark(name, title, setting, own, moved, n, check)


def cuda_dequantize_sum(setting: BenchmarkSetting, bits: int, dtype: torch.dtype, ranks: int) -> Benchmark:
    """Sum the messages of ``ranks`` ranks."""
    n = _round_down_to_blocks(setting.elements)
    values = setting.random(n)
    messages = torch.stack([_allocate_messages(n, bits, setting) for _ in range(ranks)])
    for row in messages:
        ops.quantize(values.mul_(-1.5), row.view(-1), bits=bits, pieces=PIECES)
    del values
    out = torch.zeros(n, dtype=dtype, device=setting.device)

    def own() -> None:
        ops.dequantize_sum(messages.view(-1), out, bits=bits, rows=ranks, pieces=PIECES)

    def check() -> str:
        own()
        for i, found in enumerate(out.view(PIECES, -1)):
            want = torch.empty_like(found)
            dequantize_sum_reference.reference_dequantize_sum(messages[:, i].flatten(), want, bits, ranks, 1, False)
            check_equal("dequantize_sum", found, want)
        return "every element to the bit against the reference"

    title = f"int{bits} of {ranks} rank{'s' * (ranks > 1)} from a wire to {WORDS[dtype]}"
    moved = messages.nbytes + out.nbytes
    return _copy_only_benchmark(f"dequantize_sum/int{bits}", title, setting, own, moved, n, check)


def _round_down_to_blocks(elements: int) -> int:
    """Round the number of elements down, so that every piece has full blocks of 256 and of 128."""
    return max(1, elements // (PIECES * 256)) * PIECES * 256


def _allocate_messages(n: int, bits: int, setting: BenchmarkSetting) -> torch.Tensor:
    """Allocate the messages of n elements, one per row."""
    return torch.zeros(PIECES, _native.message_bytes(n // PIECES, bits), dtype=torch.uint8, device=setting.device)


def _copy_only_benchmark(
    name: str,
    title: str,
    setting: BenchmarkSetting,
    own: Callable[[], object],
    moved: int,
    n: int,
    check: Callable[[], str],
) -> Benchmark:
    """Build a benchmark against a copy only; ``moved`` bytes for n elements."""
    contenders = [setting.contender(OWN, own, 1, moved), *setting.probes(COPY)]
    return Benchmark(name, title, contenders, COPY, check, {"elements": n})


def _add_copy_probe(make: Make) -> Make:
    """Add a copy to the probes of a benchmark of the suite."""

    def made(setting: BenchmarkSetting) -> Benchmark:
        benchmark = make(setting)
        if not any(contender.name == COPY for contender in benchmark.contenders):
            benchmark.contenders = [*benchmark.contenders, *setting.probes(COPY)]
        return benchmark

    return made


BENCHMARKS: dict[str, Make] = {
    "flat_adam/mixed": cuda_adam_mixed,
    **{name: _add_copy_probe(make) for name, make in CASES.items() if name not in ("pack", "unpack", *WIRES)},
    "pack/1000": cuda_pack_1000,
    "pack/odd": cuda_pack_unaligned,
    "cast/away": cuda_cast_away,
    "norm/bf16": cuda_norm_bf16,
    "quantize/int8": partial(cuda_quantize, bits=8, dtype=torch.bfloat16),
    "quantize/int4": partial(cuda_quantize, bits=4, dtype=torch.float32),
    "quantize/int4/residual": partial(cuda_quantize, bits=4, dtype=torch.float32, with_residual=True),
    "dequantize_sum/int8": partial(cuda_dequantize_sum, bits=8, dtype=torch.bfloat16, ranks=1),
    "dequantize_sum/int4": partial(cuda_dequantize_sum, bits=4, dtype=torch.float32, ranks=8),
}


@dataclass(frozen=True)
class BandwidthGoal:
    """The goal of a benchmark: a share of the copy's bytes per second, or a speedup over another contender."""

    benchmark: str
    least: float
    baseline: str | None = None

    def reached(self, result: Result) -> float:
        if self.baseline is None:
            return result.share(OWN, COPY).median
        return result.speedup(OWN, self.baseline).median

    def __str__(self) -> str:
        return "share of a copy" if self.baseline is None else f"times as fast as {self.baseline}"


GOALS = (
    BandwidthGoal("flat_adam/mixed", 0.95),
    BandwidthGoal("flat_adam/flat", 1.0, "torch fused"),
    BandwidthGoal("flat_adam/400", 1.1, "torch fused"),
    BandwidthGoal("mixed_step", 2.0, "torch passes"),
    BandwidthGoal("pack/1000", 3.0, CAT),
    BandwidthGoal("pack/1000", 0.9),
    *(BandwidthGoal(f"cast/{rounding}", 0.9) for rounding in ("nearest", "away", "stochastic", "tf32")),
    BandwidthGoal("norm", 0.9),
    BandwidthGoal("norm/bf16", 0.9),
    BandwidthGoal("norm/sum", 0.9),
    *(BandwidthGoal(f"quantize/{form}", 0.9) for form in ("int8", "int4", "int4/residual")),
    *(BandwidthGoal(f"dequantize_sum/{form}", 0.9) for form in ("int8", "int4")),
)


def measure_benchmarks(setting: BenchmarkSetting, names: list[str], effort: Effort) -> Iterator[Result]:
    """Yield the results of the named benchmarks; each is dropped before the next is built."""
    for name in names:
        yield run_benchmark(BENCHMARKS[name](setting), effort)
        if setting.device.type != "cpu":
            devices.get(setting.device).module().empty_cache()  # type: ignore[attr-defined]


def format_goals(record: Record) -> str:
    """Return a table of the results for each goal with a measured benchmark."""
    results = {result.name: result for result in record.results}
    rows = []
    for goal in GOALS:
        if goal.benchmark in results:
            reached = goal.reached(results[goal.benchmark])
            rows.append(
                [
                    goal.benchmark,
                    str(goal),
                    f"{goal.least:.2f}",
                    f"{reached:.3f}",
                    "" if reached >= goal.least else "missed",
                ]
            )
    return format_table(["", "figure", "goal", "reached", ""], rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="write the record there (JSON)")
    parser.add_argument("--device", default="cuda", help="cuda, cuda:1; cpu tries the program (cuda)")
    parser.add_argument(
        "--elements", type=int, default=ELEMENTS, help=f"of a benchmark, about 80 bytes each ({ELEMENTS:,})"
    )
    parser.add_argument("--only", nargs="+", choices=list(BENCHMARKS), default=list(BENCHMARKS), metavar="NAME")
    parser.add_argument("--seconds", type=float, default=5.0, help="for each benchmark, at the most (5)")
    options = parser.parse_args()
    setting = BenchmarkSetting(options.elements, devices.get(options.device).device)
    effort = replace(Effort(), most_s=options.seconds, visit_s=0.05, error=0.002)
    command = f"python -m benchmarks.cuda --device {options.device} --elements {options.elements}"
    record = Record.begin("cuda", command, machine_fingerprint(setting.device))
    for result in measure_benchmarks(setting, options.only, effort):
        record.results.append(result)
        print(f"{result.name}: {result.gb_per_s(OWN) or 0:.0f} GB/s", flush=True)
        if options.out is not None:
            record.write(options.out)
    print(f"\n{render_record(record)}\n\n{format_goals(record)}")


if __name__ == "__main__":
    main()
