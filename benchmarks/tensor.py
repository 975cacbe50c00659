"""A training step over tensor ranks, and torch's, in the same rounds. From the repository's root, or installed::

    python -m benchmarks.tensor --out runs/bench/tensor.json                          # about 3 minutes on two cores
    python -m benchmarks.tensor --precision bf16 --out runs/bench/tensor-bf16.json
    python -m benchmarks.tensor --ranks 4 --out runs/bench/tensor-4.json              # tensor 2 x data 2

A Llama of transformers with 32 M parameters, its layers divided over two tensor ranks, its training state sharded over
data ranks: npuzero (mode mtp, stage 3, shared memory), and torch's parallelize_module and FSDP2, over gloo and over
npuzero's backend "shm". Each clips by the norm of all gradients and updates with AdamW. Goals: 0.8 of torch's time, and
at most its memory.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from benchmarks.axes.beside import (
    AxisContender,
    add_axis_comparison_options,
    format_sides,
    format_time_and_memory,
    measure_sides,
)
from benchmarks.axes.contenders import RANKS
from benchmarks.axes.llama import LlamaSizes
from npuzero.bench import Record, format_command, machine_fingerprint

GOAL = 0.8
OWN, GLOO, SHM = "npuzero", "torch", 'torch on "shm"'
CONTENDERS = {GLOO: "torch", SHM: "torch-shm", OWN: "mtp"}


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_axis_comparison_options(parser)
    parser.set_defaults(rounds=40)
    options = parser.parse_args(arguments)
    record = Record.begin("tensor", format_command(), machine_fingerprint())
    sizes = LlamaSizes.of(options)
    sides = [AxisContender(name, contender, sizes, RANKS) for name, contender in CONTENDERS.items()]
    title = f"step over {RANKS} tensor ranks of {options.ranks}, {sizes.precision}, batch {sizes.batch}"
    result = measure_sides(f"tensor/{sizes.precision}-{options.ranks}", title, sides, options)
    record.results.append(result)
    print(format_sides(result))
    print(format_time_and_memory(result, OWN, (GLOO, SHM), GOAL))
    if options.out is not None:
        record.write(options.out)


if __name__ == "__main__":
    main()
