"""A training step with optimizer states on NVMe, compared with states on the device, in the same rounds::

    python -m benchmarks.farstep --folder /mnt/disk --out runs/bench/farstep.json       # about 6 minutes

The GPT of the step benchmark, in a world of one. First the update is timed alone, without overlap: all states are read
from the disk and written back. Then batch sizes are searched for which compute takes as long, in two ways, and the step
is measured at each:

    whole     forward and backward together take as long as the update
    forward   forward alone does: an update that starts after backward can only hide behind forward

Goals: 1.10 of the resident step; with updates that start during backward 1.05. On CPU ranks the host's cores both
compute and update; if one of two cores computes, the other represents the host next to a device.
"""

from __future__ import annotations

import argparse
import itertools
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import npuzero
from benchmarks.step.workload import GPTWorkload, gpt_loss
from npuzero.bench import (
    Benchmark,
    Contender,
    Effort,
    Record,
    Result,
    check_equal,
    format_command,
    machine_fingerprint,
    median,
    run_benchmark,
)
from npuzero.plan import FROM_DISK, TO_DISK

RESIDENT, FAR, EARLY = "resident", "npuzero", "npuzero, early"
#: By contender: preset, options of its optimizer, and the goal for its time relative to the resident step.
CONTENDERS: dict[str, tuple[str, dict[str, Any], float]] = {
    RESIDENT: ("zero3", {}, math.inf),
    FAR: ("infinity-states", {}, 1.10),
    EARLY: ("infinity-states", {"early": True}, 1.05),
}
#: How often a part of a step is timed alone.
TRIES = 3


class TimedTraining:
    """A model and its optimizer, run a step at a time or in parts."""

    def __init__(self, sizes: GPTWorkload, name: str, folder: Path) -> None:
        preset, how, _ = CONTENDERS[name]
        settings = npuzero.Settings(nvme_paths=(str(folder),))
        plan = npuzero.Plan.preset(preset, precision=sizes.precision)
        self.model = npuzero.zero(sizes.model(), plan=plan, settings=settings)
        self._optimizer = npuzero.AdamW(self.model.parameters(), **sizes.hyper, **how)
        self.tokens = sizes.tokens(0, 0)

    def step(self) -> Tensor:
        """Take a step. With offloaded states the update is still running when it returns."""
        loss = self.forward()
        loss.backward()
        self.update()
        return loss.detach()

    def forward(self) -> Tensor:
        return gpt_loss(self.model, self.tokens)

    def update(self) -> None:
        self._optimizer.step()
        self._optimizer.zero_grad()

    def quiet(self) -> None:
        """Wait until a running update has ended."""
        npuzero.report(self.model)

    def visit(self, count: int) -> float:
        """Return seconds per step. An untimed step before leaves its update running, as the last timed one does."""
        self.step()
        begin_s = time.perf_counter()
        for _ in range(count):
            self.step()
        seconds = (time.perf_counter() - begin_s) / count
        self.quiet()  # so that no other contender pays for it
        return seconds

    def parts(self) -> StepParts:
        """Return the parts of a step, without overlap."""
        found = [self._timed() for _ in range(TRIES + 1)][1:]
        return StepParts(*(median(values) for values in zip(*found, strict=True)))

    def _timed(self) -> tuple[float, float, float]:
        marks = [time.perf_counter()]

        def mark() -> None:
            marks.append(time.perf_counter())

        loss = self.forward()
        mark()
        loss.backward()
        mark()
        self.update()
        self.quiet()
        mark()
        forward_s, backward_s, update_s = (end - begin for begin, end in itertools.pairwise(marks))
        return forward_s, backward_s, update_s


@dataclass(frozen=True)
class StepParts:
    """Seconds of a step's parts."""

    forward_s: float
    backward_s: float
    update_s: float

    @property
    def whole_s(self) -> float:
        return self.forward_s + self.backward_s


WORDS = {"whole": "forward and backward", "forward": "forward"}
#: The part of the resident step that is to hide an update.
HIDING: dict[str, Callable[[StepParts], float]] = {
    "whole": lambda parts: parts.whole_s,
    "forward": lambda parts: parts.forward_s,
}


def measure_offload_steps(
    name: str, trainings: dict[str, TimedTraining], sizes: GPTWorkload, options: argparse.Namespace
) -> Result:
    """Find the batch, check, measure."""
    sizes, parts = find_hiding_batch(HIDING[name], trainings, sizes)
    moved = npuzero.report(trainings[FAR].model).bytes_moved
    nbytes, update_s, own = moved[FROM_DISK] + moved[TO_DISK], parts[FAR].update_s, parts[RESIDENT]
    say = f"{name}: batch {sizes.batch}, forward {own.forward_s:.2f} s, backward {own.backward_s:.2f} s; update alone"
    print(f"{say} {update_s:.2f} s, {nbytes / update_s / 1e9:.2f} GB/s; resident {own.update_s:.2f} s", flush=True)
    contenders = [Contender(who, partial(visit_training, who, training)) for who, training in trainings.items()]
    facts = {**asdict(sizes), "threads": options.threads, "disk_bytes": nbytes, "hiding": name}
    facts["parts"] = {who: asdict(each) for who, each in parts.items()}
    title = f"step with states on NVMe, {WORDS[name]} as long as the update"
    benchmark = Benchmark(f"farstep/{name}", title, contenders, RESIDENT, partial(check_same_losses, trainings), facts)
    return run_benchmark(benchmark, Effort(5, options.rounds, options.seconds, visit_s=0.0, warm_up=1))


def visit_training(who: str, training: TimedTraining, count: int) -> float:
    """Visit and print a line."""
    seconds = training.visit(count)
    print(f"  {who}: {seconds:.3f} s", flush=True)
    return seconds


def find_hiding_batch(
    hiding: Callable[[StepParts], float], trainings: dict[str, TimedTraining], sizes: GPTWorkload
) -> tuple[GPTWorkload, dict[str, StepParts]]:
    """Find a batch with hiding compute at least as long as the update from disk; return it with all timings."""
    sizes = replace(sizes, batch=1)
    while True:
        for training in trainings.values():
            training.tokens = sizes.tokens(0, 0)
        parts = {name: training.parts() for name, training in trainings.items()}  # all take the same steps
        longer = parts[FAR].update_s / hiding(parts[RESIDENT])
        if longer <= 1:
            return sizes, parts
        sizes = replace(sizes, batch=max(sizes.batch + 1, math.ceil(sizes.batch * longer)))


def check_same_losses(trainings: dict[str, TimedTraining]) -> str:
    """Check that all have the same losses; they have taken equally many steps."""
    losses = {name: torch.stack([training.step() for _ in range(3)]) for name, training in trainings.items()}
    for name, found in losses.items():
        check_equal(name, found, losses[RESIDENT])
    return "the losses of three steps, equal to the bit"


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, required=True, help="on the disk to use")
    parser.add_argument("--out", type=Path, help="write the record there (JSON)")
    parser.add_argument("--rounds", type=int, default=15, help="at the most")
    parser.add_argument("--seconds", type=float, default=150.0, help="of rounds, at the most, for each of both batches")
    parser.add_argument("--threads", type=int, default=1, help="that compute")
    GPTWorkload.add_options(parser)
    parser.set_defaults(dim=768, layers=8, heads=12, sequence=64, precision="fp32")
    options = parser.parse_args(arguments)
    torch.set_num_threads(options.threads)
    npuzero.init("cpu")
    record = Record.begin("farstep", format_command(), machine_fingerprint())
    sizes = GPTWorkload.of(options)
    trainings = {name: TimedTraining(sizes, name, options.folder) for name in CONTENDERS}
    check_same_losses(trainings)
    for name in HIDING:
        record.results.append(result := measure_offload_steps(name, trainings, sizes, options))
        for who in (name for name in CONTENDERS if name != RESIDENT):
            slow, goal = result.slowdown(who), CONTENDERS[who][2]
            print(f"{name}: {who}: {slow.median:.3f} of the resident step, MAD {slow.mad:.3f}; goal {goal}", flush=True)
    if options.out is not None:
        record.write(options.out)


if __name__ == "__main__":
    main()
