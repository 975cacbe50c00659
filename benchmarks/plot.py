"""The picture of the figures: bars of ratios, with parity and goals. Readable on light and on dark pages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from benchmarks import figures
from npuzero.bench import Result

# Greys and colours of middling lightness: the background is transparent, and the page's.
TEXT, GRID = "#7d8590", "#7d859055"
OWN, OTHER, GOAL = "#2f81f7", "#8b949e", "#e36209"
STYLE: dict[Any, Any] = {
    "font.size": 10,
    "text.color": TEXT,
    "axes.labelcolor": TEXT,
    "axes.edgecolor": GRID,
    "axes.titlesize": 11,
    "axes.titlelocation": "left",
    "axes.titlepad": 10,
    "axes.titleweight": "bold",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.spines.left": False,
    "axes.axisbelow": True,
    "xtick.color": TEXT,
    "ytick.color": TEXT,
    "ytick.major.size": 0,
}
_BAR, _ROW_INCHES, _PANEL_INCHES = 0.62, 0.27, 1.0

Row = tuple[str, Sequence[float], float | None, str]  # label, values, goal, colour


def plot(results: Mapping[str, Result], path: Path) -> None:
    """Draws a panel for each group of figures that there is, and one of every contender's training step."""
    panels: list[tuple[str, list[Row], bool]] = []
    for group, title in figures.GROUPS.items():
        found = [(figure, figure.measured(results)) for figure in figures.FIGURES if figure.group == group]
        bars: list[Row] = [(figure.name, values, figure.goal, OWN) for figure, values in found if values]
        if group == "step":
            continue
        if bars:
            panels.append((title, bars, group == "comm"))
    for name, result in sorted(results.items()):
        if name.startswith(("step/", "peers/")):
            panels.append((f"{result.title}: times as long as compute only", step_rows(result), False))
    if not panels:
        return
    heights = [len(rows) * _ROW_INCHES + _PANEL_INCHES for _, rows, _ in panels]
    with plt.rc_context(STYLE):
        figure, axes = plt.subplots(
            len(panels), 1, figsize=(10.5, sum(heights)), height_ratios=heights, layout="constrained", squeeze=False
        )
        for place, (title, rows, logarithmic) in zip(axes[:, 0], panels, strict=True):
            bars_of(place, title, rows, logarithmic=logarithmic)
        legend = [
            Patch(color=OWN, label="npuzero"),
            Patch(color=OTHER, label="others"),
            Line2D([], [], color=TEXT, linewidth=1.2, label="parity"),
            Line2D([], [], color=GOAL, linewidth=0, marker="|", markersize=12, markeredgewidth=2.5, label="goal"),
        ]
        figure.legend(handles=legend, loc="outside upper right", ncols=len(legend), frameon=False, labelcolor=TEXT)
        figure.savefig(path, dpi=150, transparent=True)
        plt.close(figure)


def step_rows(result: Result) -> list[Row]:
    """Every contender of a training step, the quickest first."""
    goals = {
        f"npuzero {preset}": figure.goal
        for figure in figures.FIGURES
        if figure.group == "step" and result.name in figure.benchmarks and figure.against == result.baseline
        for preset in figure.presets
    }
    slow = {name: result.slowdown(name).median for name in result.seconds if name != result.baseline}
    return [
        (name, [slow[name]], goals.get(name), OWN if name.startswith("npuzero") else OTHER)
        for name in sorted(slow, key=slow.__getitem__)
    ]


def bars_of(axes: Axes, title: str, rows: Sequence[Row], *, logarithmic: bool) -> None:
    """Horizontal bars to the median of each row's values, with their range, the goal's mark and the line of parity."""
    for place, (_, values, goal, colour) in enumerate(rows):
        least, most = min(values), max(values)
        axes.barh(place, least, _BAR, color=colour, linewidth=0)
        if most > least:
            axes.barh(place, most - least, _BAR, left=least, color=colour, alpha=0.45, linewidth=0)
        if goal is not None:
            axes.plot([goal, goal], [place - _BAR / 1.6, place + _BAR / 1.6], color=GOAL, linewidth=2.5, zorder=3)
        text = f"{least:.2f}" if f"{least:.2f}" == f"{most:.2f}" else f"{least:.1f}–{most:.1f}"
        right = max(most, goal or 0.0)
        axes.annotate(text, (right, place), (6, 0), textcoords="offset points", va="center", color=TEXT, fontsize=9)
    axes.set_yticks(range(len(rows)), [row[0] for row in rows])
    axes.set_ylim(len(rows) - 0.4, -0.6)
    axes.axvline(1.0, color=TEXT, linewidth=1.2)
    if logarithmic:
        axes.set_xscale("log", base=2)
        axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
    most = max(max(*values, goal or 0.0) for _, values, goal, _ in rows)
    axes.set_xlim(left=0.5 if logarithmic else 0.0, right=most * (1.6 if logarithmic else 1.15))
    axes.grid(axis="x", color=GRID, linewidth=0.8)
    axes.set_title(title, color=TEXT)
