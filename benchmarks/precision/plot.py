"""Draw losses, and each curve's mean distance from fp32 with its band; equal curves are merged under all their names::

python -m benchmarks.precision.plot benchmarks/results/precision/curves.json --out docs/precision.png
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.plot import Axes, Figure, Line2D, describe_machine, plt  # first: it chooses matplotlib's backend
from benchmarks.precision.curves import AFTER, BASELINE, CONTENDERS, WINDOW, largest_distance, smooth_losses
from npuzero.cli.output.palette import CURVES, FAINT, GOAL, OTHER, STYLE, add_caption


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("record", type=Path, help="what benchmarks.precision --out wrote")
    parser.add_argument("--out", type=Path, required=True, help="the picture, .png or .svg")
    options = parser.parse_args(arguments)
    plot_curves(json.loads(options.record.read_text("utf-8")), options.out)


def plot_curves(record: Mapping[str, Any], path: Path) -> None:
    """Draw all curves of ``record`` into the file ``path``."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with plt.rc_context(STYLE):
        figure = draw_curves(record)
        figure.savefig(path, dpi=150)
        plt.close(figure)


def draw_curves(record: Mapping[str, Any]) -> Figure:
    """Return the picture: losses on the left, their distances from fp32 on the right.

    Args:
        record: ``curves`` by name, each with its ``losses``, including fp32's; and the ``machine`` if known.
    """
    losses: dict[str, list[float]] = {
        name: record["curves"][name]["losses"] for name in CONTENDERS if name in record["curves"]
    }
    base = losses.pop(BASELINE)
    names = group_equal_curves(losses)
    figure, (left, right) = plt.subplots(1, 2, figsize=(12, 5.2), width_ratios=(1, 1.5), layout="constrained")
    steps = range(WINDOW, len(base) + 1)
    left.plot(steps, smooth_losses(base), color=OTHER, linewidth=6, label=BASELINE, solid_capstyle="round")
    for (name, label), (colour, dash) in zip(names.items(), CURVES, strict=False):
        mean = smooth_losses(losses[name])
        left.plot(steps, mean, color=colour, linewidth=1, linestyle=dash)
        apart = [own - other for own, other in zip(mean, smooth_losses(base), strict=True)]
        right.plot(steps, apart, color=colour, linewidth=2, linestyle=dash, label=label)
    bands = {CONTENDERS[name].band for name in losses}
    _draw_bands(right, bands, steps[-1])
    left.set(xlabel="step", ylabel="training loss, nats per byte", title="Losses: one curve to the eye")
    right.set(xlabel="step", ylabel="loss − fp32's, nats per byte", title="Distance from fp32's")
    for axes in (left, right):
        axes.grid(axis="y")
    handles = [*left.get_legend_handles_labels()[0], *right.get_legend_handles_labels()[0]]
    handles.append(Line2D([], [], color=GOAL, linestyle=":", linewidth=2, label="band"))
    subject = f"The example's GPT, means over {WINDOW} steps, the same batches from the same weights."
    add_caption(
        figure, summarize_curves(losses, base, max(bands)), subject, describe_machine(record.get("machine")), handles
    )
    return figure


def summarize_curves(losses: Mapping[str, list[float]], base: list[float], band: float) -> str:
    """Summarize the picture in one line."""
    far = max(largest_distance(each, base) for each in losses.values())
    if far > band:
        return f"A precision strays {far:.3f} nats per byte from fp32; {band:g} are allowed"
    return f"Every precision stays within {far:.3f} nats per byte of fp32; {band:g} are allowed"


def group_equal_curves(losses: Mapping[str, list[float]]) -> dict[str, str]:
    """Map the first name of each distinct curve to its label: the names of all equal curves."""
    found: dict[str, list[str]] = {}
    for name, each in losses.items():
        first = next((other for other in found if losses[other] == each), name)
        found.setdefault(first, []).append(name)
    return {first: " = ".join(names) for first, names in found.items()}


def _draw_bands(axes: Axes, bands: set[float], last: int) -> None:
    """Draw the allowed distance, from the first judged step."""
    for band in bands:
        for edge in (band, -band):
            axes.hlines(edge, AFTER + WINDOW, last, color=GOAL, linestyle=":", linewidth=2)
        axes.text(AFTER + WINDOW - 2, band, f"±{band:g}", ha="right", va="center")
    axes.axhline(0.0, color=FAINT, linewidth=1)
    axes.set_ylim(-1.25 * max(bands), 1.25 * max(bands))


if __name__ == "__main__":
    main()
