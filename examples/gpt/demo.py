"""The demo: the same short training under stages 0, 1, 2 and 3, and one picture of what that shows.

    make demo                      PRESET=hsdp RANKS=4 STEPS=200 make demo

Each run is ``torchrun train.py``. The stages cut the training state ever finer and change nothing else: over shared
memory their losses are bit-identical in fp32, which is checked here. Leaves in ``--out``:

    summary.json         result.json of every run, the differences between them, and the main run's held-out losses
    curves.png           losses beside measured and predicted memory per rank
    model.safetensors    the main run's weights
    <preset>/            what each run left
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from plot import plot

STAGES = ("zero0", "zero1", "zero2", "zero3")
# So large that the stages' memory differs by more than a unit's buffers; in so few steps that all four take minutes.
MODEL = ("--dim", "128", "--layers", "12", "--heads", "4", "--steps", "200")
TRAIN = Path(__file__).with_name("train.py")

Result = dict[str, Any]  # what train.py writes


def run(preset: str, ranks: int, out: Path, arguments: list[str]) -> Result:
    """Train under ``preset`` and return the result; its output goes straight to this terminal.

    Raises:
        SystemExit: the run failed; what it said last stands above.
    """
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    command = [*launcher, str(TRAIN), "--preset", preset, "--out", str(out), *arguments]
    threads = {"OMP_NUM_THREADS": str(max(1, (os.cpu_count() or 1) // ranks))}
    status = subprocess.run(command, env={**threads, **os.environ}).returncode
    if status:
        raise SystemExit(f"demo: training under {preset} ended with exit code {status}: {shlex.join(command)}")
    result: Result = json.loads((out / "result.json").read_text())
    return result


def largest_difference(results: Mapping[str, Result]) -> float:
    """The largest difference between the losses of any two stages at the same step, held-out losses included."""
    series = [[*results[stage]["losses"], results[stage]["held_out_loss"]] for stage in STAGES]
    return max((max(values) - min(values) for values in zip(*series, strict=True)), default=0.0)


def summarize(main: str, results: Mapping[str, Result], seconds: float) -> dict[str, Any]:
    """What summary.json holds."""
    return {
        "preset": main,
        "ranks": results[main]["ranks"],
        "seconds": seconds,
        "held_out_loss": results[main]["held_out_loss"],
        "held_out_loss_reloaded": results[main]["held_out_loss_reloaded"],
        "largest_difference_between_stages": largest_difference(results),
        "stages": dict(results),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description="Train under stages 0 to 3 and draw a picture. Further options go to train.py as they are.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--preset", default="zero3", help="of the main run, which samples text and leaves the weights")
    parser.add_argument("--ranks", type=int, default=2, help="processes")
    parser.add_argument("--out", type=Path, default=Path("runs/demo"), help="folder for the results")
    options, arguments = parser.parse_known_args()

    started_s = time.perf_counter()
    results: dict[str, Result] = {}
    for preset in [*(stage for stage in STAGES if stage != options.preset), options.preset]:
        sample = [] if preset == options.preset else ["--sample", "0"]
        results[preset] = run(preset, options.ranks, options.out / preset, [*MODEL, *arguments, *sample])

    summary = summarize(
        options.preset,
        {name: results[name] for name in dict.fromkeys((*STAGES, options.preset))},
        time.perf_counter() - started_s,
    )
    (options.out / "summary.json").write_text(json.dumps(summary, indent=2) + "\n")
    shutil.copyfile(options.out / options.preset / "model.safetensors", options.out / "model.safetensors")
    plot(summary, options.out / "curves.png")
    difference = summary["largest_difference_between_stages"]
    print(f"stages 0-3: largest difference between their losses {difference:g}; {summary['seconds']:.0f} s in all")
    print(f"left in {options.out}: summary.json, curves.png, model.safetensors")
    if difference:
        raise SystemExit("demo: the stages do not train alike to the bit; see summary.json")


if __name__ == "__main__":
    main()
