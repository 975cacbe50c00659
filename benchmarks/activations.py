"""A checkpointed step with activations offloaded to the host or NVMe, compared with activations on the device::

    python -m benchmarks.activations --nvme FOLDER --out runs/bench/activations.json

The GPT of the step benchmark, every block under torch's activation checkpointing, in a world of one. The baseline is
the same step with the checkpointed inputs on the device. Goal: 1.05 of its time. On CPU ranks both memories are the
process's, so that the measurement is of the copies.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import npuzero
from benchmarks.step.workload import GPTWorkload, training_step
from npuzero.bench import Benchmark, Effort, Record, check_equal, local_contender, machine_fingerprint, run_benchmark
from npuzero.plan import TO_HOST

GOAL = 1.05
BASELINE = "device"

Step = Callable[[], Tensor]


class CheckpointedBlock(nn.Module):
    """A block that keeps only its input."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = checkpoint(self.block, x, use_reentrant=False)
        return y


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="write the record there (JSON)")
    parser.add_argument("--nvme", type=Path, help="a folder on NVMe; without it only the host is measured")
    parser.add_argument("--seconds", type=float, default=120.0, help="at the most")
    parser.add_argument("--preset", default="zero2", help="of the plan (zero2)")
    GPTWorkload.add_options(parser)
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    npuzero.init("cpu")
    record = Record.begin("activations", "python -m benchmarks.activations", machine_fingerprint())
    benchmark = activation_benchmark(GPTWorkload.of(options), options.preset, options.nvme)
    record.results.append(result := run_benchmark(benchmark, Effort(most_s=options.seconds, visit_s=0.05)))
    for name in result.seconds:
        if name != BASELINE:
            print(f"{name}: {result.slowdown(name).median:.3f} of the step with activations on the device; goal {GOAL}")
    if options.out is not None:
        record.write(options.out)


def activation_benchmark(sizes: GPTWorkload, preset: str, nvme: Path | None) -> Benchmark:
    # All models train in this process: the check compares their losses step by step, to the bit.
    places = [npuzero.Memory.DEVICE, npuzero.Memory.HOST, *([npuzero.Memory.NVME] if nvme else [])]
    settings = npuzero.Settings(nvme_paths=(str(nvme),) if nvme else ())
    models = {memory.value: build_sharded_model(sizes, preset, memory, settings) for memory in places}
    tokens = sizes.tokens(0, 0)
    steps = {
        name: training_step(model, npuzero.AdamW(model.parameters(), **sizes.hyper), tokens)
        for name, model in models.items()
    }
    kept = sizes.layers * sizes.batch * sizes.sequence * sizes.dim * sizes.dtype.itemsize

    def check() -> str:
        losses = {name: torch.stack([step() for _ in range(3)]) for name, step in steps.items()}
        for name, found in losses.items():
            check_equal(name, found, losses[BASELINE])
            moved = npuzero.report(models[name]).bytes_moved[TO_HOST]
            check_equal(f"{name}: bytes moved", torch.tensor(moved), torch.tensor(0 if name == BASELINE else kept))
        return "the losses of three steps, equal to the bit, and the bytes that moved"

    contenders = [
        local_contender(name, step, nbytes=None if name == BASELINE else 2 * kept) for name, step in steps.items()
    ]
    facts = {"preset": preset, "kept_bytes": kept, **vars(sizes)}
    return Benchmark("activations", "a checkpointed step by where activations rest", contenders, BASELINE, check, facts)


def build_sharded_model(
    sizes: GPTWorkload, preset: str, memory: npuzero.Memory, settings: npuzero.Settings
) -> nn.Module:
    model = sizes.model()
    for i, block in enumerate(model.blocks):
        model.blocks[i] = CheckpointedBlock(block)
    plan = npuzero.Plan.preset(preset, precision=sizes.precision)
    return npuzero.zero(model, plan=replace(plan, activations=npuzero.Placement((), memory)), settings=settings)


if __name__ == "__main__":
    main()
