"""The training step under npuzero's presets, against compute only. From the repository's root, or installed:

    python -m benchmarks.step --presets zero2,zero3 --rounds 4            # batch 4, bf16, 2 ranks x 1 thread
    python -m benchmarks.step --presets zero2,zero3 --batch 1 --rounds 20
    python -m benchmarks.step --presets zero2 --rounds 1 --trace build/step.json
    python -m benchmarks.step --precision fp32 --out build/step-fp32.json     # every preset
    torchrun --nproc-per-node 8 -m benchmarks.step --dim 4096 --layers 32 --heads 32 --sequence 2048 --batch 1

The figure is a contender's step time relative to compute only (forward and backward, no optimizer, no communication) in
the same round. ``--trace`` writes a Chrome trace of two steps of every rank of the last contender.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from benchmarks.step.compare import ALONE, COMPUTE, add_comparison_options, preset_entry, run_comparison
from benchmarks.step.contenders import PRESETS


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--presets", type=lambda text: text.split(","), default=list(PRESETS), help="with commas")
    parser.add_argument("--trace", type=Path, help="write a Chrome trace of the last preset there")
    add_comparison_options(parser)
    options = parser.parse_args()
    # In bf16 plain torch keeps float32 masters, as npuzero does; on one rank it is a full training of the model.
    baselines = [COMPUTE, ALONE] if options.precision == "fp32" or options.ranks == 1 else [COMPUTE]
    run_comparison(
        "step", baselines + [preset_entry(preset) for preset in options.presets], options, trace=options.trace
    )


if __name__ == "__main__":
    main()
