"""The demo's picture: loss curves that lie on one another, beside the memory that tells the stages apart.

python examples/gpt/plot.py runs/demo/summary.json runs/demo/curves.png
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.patches import Patch

LABELS = {"zero0": "stage 0", "zero1": "stage 1", "zero2": "stage 2", "zero3": "stage 3"}
ENLARGED_STEPS, ENLARGED = 25, "#f3f3f3"
# Wide and pale beneath, narrow and dark on top: each of several equal curves stays visible.
CURVES = (("#c6dbef", 9.0), ("#6baed6", 5.5), ("#2171b5", 2.8), ("#08193a", 0.9), ("#d94801", 0.9))
PARTS = {"parameters": "#1b6ca8", "gradients": "#5fb49c", "states": "#f2b134", "buffers": "#b5b5b5"}
LOOKS: dict[str, dict[str, Any]] = {"measured": {}, "predicted": {"alpha": 0.55, "hatch": "////"}}
STYLE: dict[Any, Any] = {
    "font.size": 11,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.titlesize": 12,
    "axes.titlelocation": "left",
    "axes.titlepad": 12,
    "axes.axisbelow": True,
    "hatch.linewidth": 0.6,
}


def draw_losses(axes: Axes, stages: Mapping[str, Any]) -> None:
    """Loss over steps, one curve a stage; an inset enlarges the last steps."""
    steps = max(len(result["losses"]) for result in stages.values())
    shown = min(ENLARGED_STEPS, steps)
    inset = axes.inset_axes((0.4, 0.44, 0.58, 0.36))
    for (name, result), (color, width) in zip(stages.items(), CURVES, strict=False):
        curve = list(enumerate(result["losses"], 1))
        axes.plot(*zip(*curve, strict=True), color=color, linewidth=width / 2, label=LABELS.get(name, name))
        inset.plot(*zip(*curve[-shown:], strict=True), color=color, linewidth=width)
    axes.set(xlabel="step", ylabel="training loss (nats per byte)", xlim=(0, steps * 1.02))
    axes.grid(axis="y", color="#e6e6e6")
    axes.legend(frameon=False, ncols=len(stages), loc="upper right", handlelength=1.5, columnspacing=1.2)
    inset.set(xlim=(steps - shown + 0.5, steps + 0.5), facecolor=ENLARGED)
    inset.set_title(f"the last {shown} steps", fontsize=10, pad=4)
    inset.tick_params(labelsize=9)
    axes.axvspan(steps - shown + 0.5, steps + 0.5, ymax=0.4, color=ENLARGED)


def draw_memory(axes: Axes, stages: Mapping[str, Any]) -> None:
    """Bytes held per rank, by part: two bars a stage, measured (solid) and predicted (hatched)."""
    width = 0.38
    for place, result in enumerate(stages.values()):
        for offset, (source, look) in zip((-0.2, 0.2), LOOKS.items(), strict=True):
            bottom = 0.0
            for part, color in PARTS.items():
                height = result["bytes_held"][source][part] / 1e6
                axes.bar(place + offset, height, width, bottom, color=color, edgecolor="white", linewidth=0.5, **look)
                bottom += height
            axes.annotate(f"{bottom:.1f}", (place + offset, bottom), (0, 3), textcoords="offset points", ha="center")
    sent = (sum(result["bytes_sent"]["measured"].values()) / 1e6 for result in stages.values())
    labels = [f"{LABELS.get(name, name)}\n{mb:.1f} MB sent" for name, mb in zip(stages, sent, strict=True)]
    axes.set_xticks(range(len(labels)), labels)
    axes.tick_params(axis="x", length=0)
    axes.set(ylabel="MB held per rank", title="Memory per rank, and bytes sent per step")
    axes.grid(axis="y", color="#e6e6e6")
    axes.set_ylim(top=1.22 * axes.get_ylim()[1])  # room for the legend above the lower bars
    legend = [Patch(color=color, label=part) for part, color in PARTS.items()]
    legend.append(Patch(facecolor="#777777", label="measured"))
    legend.append(Patch(facecolor="#bbbbbb", hatch="////", edgecolor="white", label="predicted"))
    axes.legend(handles=legend, frameon=False, ncols=3, loc="upper right")


def plot(summary: Mapping[str, Any], path: Path) -> None:
    """Draw ``summary`` (see demo.py) to the image file ``path``."""
    stages, difference = summary["stages"], summary["largest_difference_between_stages"]
    first = next(iter(stages.values()))
    with plt.rc_context(STYLE):
        figure, (left, right) = plt.subplots(1, 2, figsize=(13, 5.6), width_ratios=(1, 1.1), layout="constrained")
        draw_losses(left, stages)
        draw_memory(right, stages)
        alike = "bit-identical" if difference == 0 else f"apart by up to {difference:.1e}"
        left.set_title(f"Losses of stages 0–3: {alike}")
        figure.suptitle(
            f"A GPT of {first['parameters']:,} parameters on {summary['ranks']} ranks, {first['options']['precision']}"
        )
        figure.savefig(path, dpi=150)
        plt.close(figure)


if __name__ == "__main__":
    plot(json.loads(Path(sys.argv[1]).read_text()), Path(sys.argv[2]))
