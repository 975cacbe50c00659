"""A training step over pipeline stages compared with torch's, in the same rounds. From the repository's root::

    python -m benchmarks.pipeline --out runs/bench/pipeline.json                 # about 5 minutes on two cores
    python -m benchmarks.pipeline --precision bf16 --out runs/bench/pipeline-bf16.json
    python -m benchmarks.pipeline --ranks 4 --out runs/bench/pipeline-4.json     # pipe 2 x data 2
    python -m benchmarks.pipeline --rounds 1 --trace runs/bench/trace/pipeline.json

A Llama of transformers with 32 M parameters, its layers divided over two stages, with eight micro-batches in 1F1B
order. Contenders: npuzero (stage 3 within a stage's ranks, shared memory; with data ranks also stage 2), and torch's
PipelineStage, Schedule1F1B and FSDP2, over gloo and over npuzero's backend "shm"; with one rank per stage in fp32 also
without FSDP2. Each clips by the norm over all stages and updates with AdamW. *compute only* is each rank's work without
communication: forward and backward of its stage's micro-batches, and the update of all its parameters, in as many
processes.

Goals: 0.85 of torch's time and at most its memory; and 1.05 (1 + bubble) of compute only, where the bubble is the idle
share of a rank's step. The latter applies to two ranks: if ranks share a core, one works in the bubble of another.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path

from benchmarks.axes.beside import (
    AxisContender,
    add_axis_comparison_options,
    format_sides,
    format_time_and_memory,
    measure_sides,
)
from benchmarks.axes.pipes import STAGES, PipelineSizes
from benchmarks.step.compare import write_trace
from npuzero.bench import Record, Result, Team, format_command, machine_fingerprint

GOAL, COMPUTE_GOAL = 0.85, 1.05
OWN, ZERO2, BUBBLE, COMPUTE = "npuzero", "npuzero zero2", "npuzero zero-bubble", "compute only"
GLOO, SHM, WHOLE = "torch", 'torch on "shm"', "torch without FSDP2"
CONTENDERS = {GLOO: "torch", SHM: "torch-shm", COMPUTE: "compute", OWN: "zero3", BUBBLE: "zero-bubble"}


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_axis_comparison_options(parser, PipelineSizes)
    parser.add_argument("--trace", type=Path, help="write a Chrome trace of npuzero's step there, for benchmarks.trace")
    parser.set_defaults(rounds=30, seconds=240.0)
    options = parser.parse_args(arguments)
    record = Record.begin("pipeline", format_command(), machine_fingerprint())
    sizes = PipelineSizes.of(options)
    contenders = CONTENDERS | extra_contenders(sizes.precision, options.ranks)
    sides = [
        AxisContender(name, each, sizes, STAGES, apart=True, learns=name != COMPUTE, work="benchmarks.axes.pipes")
        for name, each in contenders.items()
    ]
    over = f"{STAGES} stages of {options.ranks} ranks"
    title = f"step over {over}, {sizes.precision}, {sizes.micro_batches} micro-batches"
    also = partial(ask_schedule, sizes=sizes, trace=options.trace)
    result = measure_sides(f"pipeline/{sizes.precision}-{options.ranks}", title, sides, options, also)
    record.results.append(result)
    print(format_sides(result))
    print(format_time_and_memory(result, OWN, (GLOO, SHM), GOAL))
    if options.ranks == STAGES:
        longer, goal = result.slowdown(OWN, COMPUTE).median, COMPUTE_GOAL * (1 + sizes.bubble)
        print(f"over {COMPUTE}: time {longer:.3f}, goal {goal:.3f}")
    if options.out is not None:
        record.write(options.out)


def extra_contenders(precision: str, ranks: int) -> dict[str, str]:
    """Return contenders of some runs: stage 2, if a stage has several ranks; with one, torch without FSDP2.

    FSDP2 can only be omitted in fp32: in bf16 it rounds the parameters.
    """
    if ranks > STAGES:
        return {ZERO2: "zero2"}
    return {WHOLE: "torch-whole"} if precision == "fp32" else {}


def ask_schedule(teams: Mapping[str, Team], result: Result, sizes: PipelineSizes, trace: Path | None) -> None:
    """Record the schedule's bubble, and the bytes between stages: the minimum, and npuzero's."""
    result.parameters.update(bubble=sizes.bubble, sent_bytes=sizes.sent_bytes)
    for name in {OWN, ZERO2} & teams.keys():
        result.values[name]["sent_bytes"] = teams[name].ask("sent")
    if trace is not None:
        schedule = {"name": "1f1b", "ranks": STAGES, "micro_batches": sizes.micro_batches}
        write_trace(trace, teams[OWN].ask("trace", steps=2), title=f"A {result.title}.", schedule=schedule)


if __name__ == "__main__":
    main()
