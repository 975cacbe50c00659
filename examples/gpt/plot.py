"""The demo's picture: loss curves that lie on one another, beside the memory that tells the stages apart.

python examples/gpt/plot.py runs/demo/summary.json runs/demo/curves.png
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from npuzero.cli.output.palette import CURVES, FAINT, NAMES, OTHER, PAPER, PARTS, SHADE, STYLE, add_caption

LABELS = {"zero0": "stage 0", "zero1": "stage 1", "zero2": "stage 2", "zero3": "stage 3"}
ENLARGED_STEPS = 25
WIDTHS = (9.0, 6.0, 3.5, 1.5, 0.8)  # wide beneath, narrow on top: each of several equal curves stays visible
HELD = tuple(part for part in PARTS if part != "activations")  # of which reports say nothing
LOOKS: dict[str, dict[str, Any]] = {"measured": {}, "predicted": {"alpha": 0.55, "hatch": "////"}}


def draw_losses(axes: Axes, stages: Mapping[str, Any], difference: float) -> None:
    """Draw loss over steps, one curve a stage; an inset enlarges the last steps."""
    steps = max(len(result["losses"]) for result in stages.values())
    shown = min(ENLARGED_STEPS, steps)
    inset = axes.inset_axes((0.4, 0.44, 0.58, 0.36))
    for (name, result), (color, _), width in zip(stages.items(), CURVES, WIDTHS, strict=False):
        curve = list(enumerate(result["losses"], 1))
        axes.plot(*zip(*curve, strict=True), color=color, linewidth=width / 1.6, label=LABELS.get(name, name))
        inset.plot(*zip(*curve[-shown:], strict=True), color=color, linewidth=width)
    axes.set(xlabel="step", ylabel="training loss, nats per byte", xlim=(0, steps * 1.02))
    same = "equal to the bit: the curves lie on one another" if difference == 0 else f"apart by up to {difference:.1e}"
    axes.set_title(f"Losses, {same}")
    axes.grid(axis="y")
    axes.legend(ncols=len(stages), loc="upper right", fontsize=10, handlelength=1.3, columnspacing=1.0)
    inset.set(xlim=(steps - shown + 0.5, steps + 0.5), facecolor=SHADE)
    inset.set_title(f"the last {shown} steps", fontsize=10, pad=4, fontweight="normal")
    inset.tick_params(labelsize=9)
    axes.axvspan(steps - shown + 0.5, steps + 0.5, ymax=0.4, color=SHADE)


def draw_memory(axes: Axes, stages: Mapping[str, Any]) -> None:
    """Draw bytes held per rank, by part: two bars a stage, measured (solid) and predicted (hatched)."""
    width = 0.38
    for place, result in enumerate(stages.values()):
        for offset, source in zip((-0.2, 0.2), LOOKS, strict=True):
            bottom = 0.0
            for part in HELD:
                height = result["bytes_held"][source][part] / 1e6
                look = {"color": PARTS[part], "edgecolor": PAPER, "linewidth": 0.5, **LOOKS[source]}
                axes.bar(place + offset, height, width, bottom, **look)
                bottom += height
            axes.annotate(f"{bottom:.1f}", (place + offset, bottom), (0, 3), textcoords="offset points", ha="center")
    sent = (sum(result["bytes_sent"]["measured"].values()) / 1e6 for result in stages.values())
    labels = [f"{LABELS.get(name, name)}\n{mb:.1f} MB sent" for name, mb in zip(stages, sent, strict=True)]
    axes.set_xticks(range(len(labels)), labels)
    axes.tick_params(axis="x", length=0)
    axes.set(ylabel="MB held per rank", title="Memory per rank, and bytes sent per step")
    axes.grid(axis="y")
    axes.set_ylim(top=1.22 * axes.get_ylim()[1])  # room for the legend above the lower bars
    legend = [Patch(color=PARTS[part], label=NAMES.get(part, part)) for part in HELD]
    legend.append(Patch(facecolor=FAINT, label="measured"))
    legend.append(Patch(facecolor=OTHER, hatch="////", edgecolor=PAPER, label="predicted"))
    axes.legend(handles=legend, ncols=3, loc="upper right", fontsize=10)


def finding(stages: Mapping[str, Any]) -> str:
    """Return what the picture shows, in a line: what the first stage and the leanest hold."""
    held = {name: sum(result["bytes_held"]["measured"].values()) / 1e6 for name, result in stages.items()}
    first, least = next(iter(held)), min(held, key=held.__getitem__)
    names = {name: LABELS.get(name, name) for name in held}
    if held[least] == held[first]:
        return f"All stages hold {held[first]:.1f} MB a rank"
    return f"{names[least].capitalize()} holds {held[least]:.1f} MB a rank where {names[first]} holds {held[first]:.1f}"


def draw(summary: Mapping[str, Any]) -> Figure:
    """Return the picture of ``summary`` (see demo.py)."""
    stages, difference = summary["stages"], summary["largest_difference_between_stages"]
    first = next(iter(stages.values()))
    figure, (left, right) = plt.subplots(1, 2, figsize=(13, 6), width_ratios=(1, 1.1), layout="constrained")
    draw_losses(left, stages, difference)
    draw_memory(right, stages)
    size = f"{first['parameters']:,} parameters on {summary['ranks']} ranks, {first['options']['precision']}"
    why = "Stages say which rank holds what, and change no number." if difference == 0 else ""
    add_caption(figure, finding(stages), f"A GPT of {size}. {why}", "Measured and predicted by examples/gpt/demo.py.")
    return figure


def draw_offload(summary: Mapping[str, Any]) -> Figure:
    """Return the picture of ``summary`` (see offload.py)."""
    runs, mb = summary["runs"], 1e-6
    figure, (left, right) = plt.subplots(1, 2, figsize=(13, 6), width_ratios=(1, 1.1), layout="constrained")
    draw_losses(left, {name: each["result"] for name, each in runs.items()}, summary["difference"])
    for (name, each), (color, dashes) in zip(runs.items(), CURVES, strict=False):
        held = [nbytes * mb for nbytes in each["held"]]
        right.plot(each["seconds"], held, color=color, linestyle=dashes, label=f"{name}, at most {max(held):.0f} MB")
    right.axhline(
        summary["cap_bytes"] * mb, color=OTHER, linestyle=":", label=f"cap, {summary['cap_bytes'] * mb:.0f} MB"
    )
    right.set(xlabel="seconds", ylabel="MB in memory, all ranks", title="Memory of all processes", ylim=(0, None))
    right.set_ylim(top=1.3 * right.get_ylim()[1])  # room for the legend
    right.grid(axis="y")
    right.legend(loc="upper right", fontsize=10)
    states, room = summary["states_bytes"] * mb, summary["states_cap_bytes"] * mb
    finding = f"Optimizer states of {states:.0f} MB on a disk, {room:.0f} MB of memory for them"
    if summary["difference"] == 0:
        finding += ": the same losses"
    result = next(iter(runs.values()))["result"]
    size = f"{result['parameters']:,} parameters on {result['ranks']} ranks, {result['options']['precision']}"
    add_caption(figure, finding, f"A GPT of {size}, stage 3.", "Measured by examples/gpt/offload.py.")
    return figure


def plot(summary: Mapping[str, Any], path: Path, drawn: Callable[[Mapping[str, Any]], Figure] = draw) -> None:
    """Draw ``summary`` (see demo.py; or offload.py, by ``draw_offload``) to the image file ``path``."""
    with plt.rc_context(STYLE):
        figure = drawn(summary)
        figure.savefig(path, dpi=150)
        plt.close(figure)


if __name__ == "__main__":
    plot(json.loads(Path(sys.argv[1]).read_text()), Path(sys.argv[2]))
