"""A step on a sequence shared by ranks, compared with one sequence per rank. From the repository's root, or installed::

    python -m benchmarks.sequence --out runs/bench/sequence.json         # about 3 minutes on two cores

A layer of a Llama of transformers, as wide as in larger models. Under npuzero's ``isp`` two ranks share a sequence of
4,096 tokens; under its ``zero3`` each has a sequence of 2,048, so that the tokens per rank are equal. Goal: 1.10 of
zero3's time. In the longer sequence attention looks back twice as far; the record contains the ratio of the work.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from benchmarks.axes.beside import AxisContender, add_axis_comparison_options, format_sides, measure_sides
from benchmarks.axes.contenders import RANKS
from benchmarks.axes.llama import LlamaSizes
from npuzero.bench import Record, format_command, machine_fingerprint

SIZES: dict[str, Any] = {
    "dim": 1536,
    "hidden": 6144,
    "layers": 1,
    "heads": 12,
    "key_value_heads": 6,
    "vocabulary": 2048,
    "sequence": 4096,
    "precision": "fp32",
}
GOAL = 1.10
OWN, APART = "isp", "zero3"


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_axis_comparison_options(parser)
    parser.set_defaults(**SIZES, visit=0.0, seconds=90.0)
    options = parser.parse_args(arguments)
    record = Record.begin("sequence", format_command(), machine_fingerprint())
    shared = LlamaSizes.of(options)
    apart = replace(shared, sequence=shared.sequence // RANKS)
    sides = [AxisContender(APART, "zero3", apart, 1), AxisContender(OWN, "isp", shared, RANKS)]
    title = f"step on sequences of {shared.sequence} that {RANKS} ranks share, {shared.precision}"
    result = measure_sides("sequence", title, sides, options)
    result.parameters["work"] = token_multiplications(shared) / token_multiplications(apart)
    record.results.append(result)
    print(format_sides(result))
    print(f"{OWN}: {result.slowdown(OWN).median:.3f} of {APART}; goal {GOAL}; work {result.parameters['work']:.3f}")
    if options.out is not None:
        record.write(options.out)


def token_multiplications(sizes: LlamaSizes) -> float:
    """Return the multiplications of a token's forward: of the Linears, and of causal attention on average."""
    features = sizes.dim * sizes.key_value_heads // sizes.heads
    linears = sizes.layers * (2 * sizes.dim * (sizes.dim + features) + 3 * sizes.dim * sizes.hidden)
    head, attention = sizes.dim * sizes.vocabulary, sizes.layers * sizes.sequence * sizes.dim
    return linears + head + attention


if __name__ == "__main__":
    main()
