"""Loss curves of the demo's GPT in every precision against fp32. From the repository's root::

    python -m benchmarks.precision --out runs/precision.json --plot runs/precision.png
    python -m benchmarks.precision bf16 fp16 --out runs/precision.json       # trains these, keeps other curves

Exits with status 1 if a curve leaves its band.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch

from benchmarks.precision.curves import (
    BASELINE,
    CONTENDERS,
    PLAN,
    RANKS,
    STEPS,
    Options,
    largest_distance,
    load_corpus,
    train_curve,
)
from npuzero.bench import machine_fingerprint

SCHEMA = 1


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"among {', '.join(CONTENDERS)}; all of them")
    parser.add_argument("--steps", type=int, default=STEPS, help=f"optimizer steps ({STEPS})")
    parser.add_argument("--out", type=Path, help="the curves as JSON; those of other names stay in it")
    parser.add_argument("--plot", type=Path, help="draw them")
    arguments = parser.parse_args()
    unknown = [name for name in arguments.names if name not in CONTENDERS]
    if unknown:
        parser.error(f"no such curve: {', '.join(unknown)}")
    torch.set_num_threads(1)
    options = Options(steps=arguments.steps)
    sizes = {name: getattr(options, name) for name in ("steps", "batch", "seq", "dim", "layers", "heads", "lr", "seed")}
    record = load_curves(arguments.out, {**sizes, "ranks": RANKS, "plan": PLAN})
    text = load_corpus()
    for name in arguments.names or CONTENDERS:
        print(name, flush=True)
        record["curves"][name] = asdict(train_curve(CONTENDERS[name], text, options))
        if arguments.out is not None:
            write_curves(arguments.out, record)
    outside = judge_curves(record["curves"])
    if arguments.plot is not None:
        from benchmarks.precision.plot import plot_curves

        plot_curves(record, arguments.plot)
    sys.exit(1 if outside else 0)


def judge_curves(curves: dict[str, Any]) -> list[str]:
    """Print the distance of each curve from the baseline; return the names of curves outside their bands."""
    outside = []
    for name in (name for name in CONTENDERS if name in curves and BASELINE in curves):
        far, band = largest_distance(curves[name]["losses"], curves[BASELINE]["losses"]), CONTENDERS[name].band
        print(
            f"{name}: {far:.4f} nats per byte from fp32 at the most, allowed {band}; {curves[name]['skipped']} skipped"
        )
        if far > band:
            outside.append(name)
    return outside


def load_curves(path: Path | None, options: dict[str, Any]) -> dict[str, Any]:
    """Return the record in the file if it has the same options; else an empty one."""
    now = {
        "schema": SCHEMA,
        "command": "python -m benchmarks.precision",
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "machine": machine_fingerprint(),
        "options": options,
        "curves": {},
    }
    if path is not None and path.exists():
        before = json.loads(path.read_text("utf-8"))
        if before["schema"] == SCHEMA and before["options"] == options:
            now["curves"] = before["curves"]
    return now


def write_curves(path: Path, record: dict[str, Any]) -> None:
    for each in record["curves"].values():
        each["losses"] = [round(loss, 5) for loss in each["losses"]]
    names = dict.fromkeys((*CONTENDERS, *record["curves"]))
    ordered = {name: record["curves"][name] for name in names if name in record["curves"]}
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = ",\n".join(f"  {json.dumps(name)}: {json.dumps(each)}" for name, each in ordered.items())
    facts = {key: value for key, value in record.items() if key != "curves"}
    path.write_text(json.dumps(facts, indent=1)[:-2] + ',\n "curves": {\n' + lines + "\n }\n}\n", encoding="utf-8")


if __name__ == "__main__":
    main()
