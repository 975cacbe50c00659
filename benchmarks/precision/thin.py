"""Loss curves of the demo's GPT over thin wires, against bf16, by seed. From the repository's root::

    python -m benchmarks.precision.thin --out runs/thin.json
    python -m benchmarks.precision.thin --out benchmarks/results/precision/thin.json --page docs/numerics.md

Two nodes of two ranks. Exits with status 1 if a curve leaves its band; error feedback is reported, not judged.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import Any

import torch

from benchmarks.precision.__main__ import load_curves, write_curves
from benchmarks.precision.curves import (
    AFTER,
    BF16,
    Options,
    PrecisionContender,
    largest_distance,
    load_corpus,
    train_curve,
)
from npuzero import Precision

SEEDS = (0, 1, 2)
STEPS = 300
BASE = "hpz"
BEGIN, END = "<!-- thin: begin -->", "<!-- thin: end -->"
_FEEDBACK = Precision(BF16, gathers="int8", wires={"node": "int4"}, feedback="node")
_ALL = Precision(BF16, gathers="int8", wires="int4", feedback="all")
_ROW = PrecisionContender("bf16", 0.0, plan=BASE, ranks=4, local_size=2)
#: Settings of each run, and its band; infinite if the run is only reported.
CONTENDERS: dict[str, PrecisionContender] = {
    BASE: _ROW,
    "zero++": replace(_ROW, plan="zero++", band=0.03),
    "thin": replace(_ROW, plan="thin", band=0.02),
    "zero++, feedback": replace(_ROW, plan="zero++", precision=_ALL, band=float("inf")),
    "thin, feedback": replace(_ROW, plan="thin", precision=_FEEDBACK, band=float("inf")),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=STEPS, help=f"optimizer steps ({STEPS})")
    parser.add_argument("--out", type=Path, help="the curves as JSON; those of the same options stay in it")
    parser.add_argument("--page", type=Path, help="put the table of the record --out into this page, and train nothing")
    arguments = parser.parse_args()
    if arguments.page is not None:
        head, rest = arguments.page.read_text("utf-8").split(BEGIN)
        made = thin_table(json.loads(arguments.out.read_text("utf-8"))["curves"])
        arguments.page.write_text(f"{head}{BEGIN}\n{made}\n{END}{rest.split(END)[1]}", "utf-8")
        return
    torch.set_num_threads(1)
    options = Options(steps=arguments.steps, batch=2)
    sizes = {name: getattr(options, name) for name in ("steps", "batch", "seq", "dim", "layers", "heads", "lr")}
    record = load_curves(arguments.out, {**sizes, "nodes": 2, "ranks": 4, "plan": BASE})
    record["command"] = "python -m benchmarks.precision.thin"
    text = load_corpus()
    for seed in SEEDS:
        for name, contender in CONTENDERS.items():
            if f"{name}, seed {seed}" in record["curves"]:
                continue
            print(name, seed, flush=True)
            losses = train_curve(contender, text, replace(options, seed=seed)).losses
            record["curves"][f"{name}, seed {seed}"] = {"losses": losses, "skipped": 0}
            if arguments.out is not None:
                write_curves(arguments.out, record)
    print(thin_table(record["curves"]))
    sys.exit(1 if find_outside(record["curves"]) else 0)


def run_losses(curves: Mapping[str, Any], name: str, seed: int) -> list[float]:
    """Return the loss of each step of one run."""
    found: list[float] = curves[f"{name}, seed {seed}"]["losses"]
    return found


def largest_distances(curves: Mapping[str, Any], name: str) -> list[float]:
    """Return a curve's largest distance from bf16's by seed: means over 20 steps, see ``largest_distance``."""
    return [largest_distance(run_losses(curves, name, seed), run_losses(curves, BASE, seed)) for seed in SEEDS]


def last_losses(curves: Mapping[str, Any], name: str) -> float:
    """Return the mean loss of the last :data:`AFTER` steps over the seeds, minus bf16's."""
    return fmean(
        fmean(run_losses(curves, name, seed)[-AFTER:]) - fmean(run_losses(curves, BASE, seed)[-AFTER:])
        for seed in SEEDS
    )


def find_outside(curves: Mapping[str, Any]) -> list[str]:
    """Return the names of the curves outside their bands."""
    return [name for name, each in CONTENDERS.items() if max(largest_distances(curves, name)) > each.band]


def thin_table(curves: Mapping[str, Any]) -> str:
    """Return each contender's distance from bf16, in nats per byte, as a Markdown table."""
    seeds = " | ".join(f"seed {seed}" for seed in SEEDS)
    lines = [
        f"| nats per byte from bf16 | {seeds} | at most | mean of the last {AFTER} steps |",
        f"|---|{'---|' * len(SEEDS)}---|---|",
    ]
    for name, contender in CONTENDERS.items():
        if name == BASE:
            continue
        far = largest_distances(curves, name)
        kept = "" if max(far) <= contender.band else " ✗"
        band = "not held to one" if contender.band == float("inf") else f"{contender.band:g}{kept}"
        cells = " | ".join(f"{each:.4f}" for each in far)
        lines.append(f"| {name} | {cells} | {band} | {last_losses(curves, name):+.4f} |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
