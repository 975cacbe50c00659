"""The engine's host time per step, compared with plain torch's. From the repository's root, or installed::

    python -m benchmarks.host --out runs/bench/host.json

A GPT with negligible kernel times, in a world of one without communication: forward, backward, clipping, update. The
baseline is plain torch with its fused AdamW. npuzero's additional time is compared with 1 ms and 50 us per unit.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from statistics import median

import torch

import npuzero
from benchmarks.step.workload import HYPER, MAX_NORM, GPTWorkload, training_step
from npuzero.bench import (
    Benchmark,
    Contender,
    Effort,
    Record,
    check_close,
    local_contender,
    machine_fingerprint,
    run_benchmark,
)

PRESETS = ("zero0", "zero2", "zero3")
LAYERS = (8, 32)
TORCH = "torch"

Step = Callable[[], torch.Tensor]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="write the record there (JSON)")
    parser.add_argument("--seconds", type=float, default=15.0, help="for each size of model, at the most")
    options = parser.parse_args()
    torch.set_num_threads(1)
    npuzero.init("cpu")
    record = Record.begin("host", "python -m benchmarks.host", machine_fingerprint())
    for layers in LAYERS:
        benchmark = host_benchmark(layers)
        result = run_benchmark(benchmark, Effort(most_s=options.seconds, visit_s=0.05))
        record.results.append(result)
        units = result.parameters["units"]
        for name, seconds in result.seconds.items():
            more_s = median(own - plain for own, plain in zip(seconds, result.seconds[TORCH], strict=True))
            result.values[name]["more_s"] = more_s
            if name != TORCH:
                allowed_ms = 1 + 0.05 * units
                print(f"{name}, {units} units: {more_s * 1e3:.2f} ms more than plain torch; allowed {allowed_ms:.2f}")
    if options.out is not None:
        record.write(options.out)


def host_benchmark(layers: int) -> Benchmark:
    """Build the benchmark of a GPT of ``layers`` blocks, each a unit, and the root."""
    sizes = GPTWorkload(dim=32, layers=layers, heads=1, sequence=8, batch=1, precision="fp32")
    steps = {TORCH: plain_step(sizes)} | {f"npuzero {preset}": sharded_step(sizes, preset) for preset in PRESETS}

    def check() -> str:
        want = torch.stack([steps[TORCH]() for _ in range(3)])
        for name, step in steps.items():
            if name != TORCH:
                check_close(name, torch.stack([step() for _ in range(3)]), want, tolerance=1e-5)
        return "the losses of three steps, within 1e-5 of plain torch's"

    contenders: list[Contender] = [local_contender(name, step) for name, step in steps.items()]
    facts = {"units": layers + 1, "parameters": len(list(sizes.model().parameters()))}
    return Benchmark(f"host/{layers}", f"host's work in a step, {layers + 1} units", contenders, TORCH, check, facts)


def plain_step(sizes: GPTWorkload) -> Step:
    model = sizes.model()
    optimizer = torch.optim.AdamW(model.parameters(), fused=True, **HYPER)
    return training_step(
        model, optimizer, sizes.tokens(0, 0), lambda: torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
    )


def sharded_step(sizes: GPTWorkload, preset: str) -> Step:
    model = npuzero.zero(sizes.model(), plan=preset)
    optimizer = npuzero.AdamW(model.parameters(), **HYPER)
    return training_step(model, optimizer, sizes.tokens(0, 0), lambda: npuzero.clip_grad_norm_(model, MAX_NORM))


if __name__ == "__main__":
    main()
