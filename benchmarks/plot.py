"""The picture of the figures: a dot per ratio, with parity and goals; each panel states which side is better.

python -m benchmarks.plot RECORD... --out docs/nvme.png     # of states on a disk: see tiers.py
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from benchmarks import tiers
from benchmarks.contenders import contender_label, describe_records
from benchmarks.goals import FIGURES
from npuzero.bench import Record, Result
from npuzero.cli.output.palette import FAINT, GOAL, OTHER, OWN, PAPER, STYLE, TEXT, add_caption

_ROW_INCHES, _PANEL_INCHES, _HEAD_INCHES = 0.27, 0.95, 1.1
_WAY = ", read in place"  # the suffix of the second of two figures of one collective: one row shows both

#: The look of a value: colour, fill and shape of its dot.
Look = tuple[str, str, str]
NPUZERO, SLOTS, PEER = (OWN, OWN, "o"), (OWN, PAPER, "o"), (OTHER, OTHER, "s")
LEGEND = {"npuzero": NPUZERO, "npuzero, plain tensors (one copy more)": SLOTS, "others": PEER}


@dataclass(frozen=True)
class PanelRow:
    """Describe a line of a panel.

    Attributes:
        label: to its left.
        dots: values by look; several values of one look form a range.
        goal: None without a goal.
        note: to its right.
    """

    label: str
    dots: Mapping[Look, Sequence[float]]
    goal: float | None = None
    note: str = ""


@dataclass(frozen=True)
class FigurePanel:
    """Describe rows on a shared axis.

    Attributes:
        title: unique.
        axis: label of the values.
        better: ``"right"`` or ``"left"``.
        note: heading of the rows' notes.
    """

    title: str
    rows: Sequence[PanelRow]
    axis: str
    better: str
    logarithmic: bool = False
    note: str = ""


def plot_figures(results: Mapping[str, Result], path: Path, source: str = "") -> None:
    """Draw all figures in ``results`` into the file ``path``; no file without figures."""
    with plt.rc_context(STYLE):
        figure = draw_figures(results, source)
        if figure is not None:
            figure.savefig(path, dpi=150)
            plt.close(figure)


def draw_figures(results: Mapping[str, Result], source: str = "") -> Figure | None:
    """Return the picture with a column for kernels, and one for training steps and their peers."""
    # Either column may be missing: records of single suites are drawn as well.
    columns = [column for column in (part(results) for part in (kernel_panels, peer_panels)) if column]
    if not columns:
        return None
    inches = max(sum(map(_panel_height, column)) for column in columns) + _HEAD_INCHES
    figure = plt.figure(figsize=(6.7 * len(columns), inches), layout="constrained")
    widths = [1.15, 1.0] if len(columns) == 2 else [1.0]
    places = figure.add_gridspec(1, len(columns), wspace=0.02, width_ratios=widths)
    for place, column in zip(places, columns, strict=True):
        rows = place.subgridspec(len(column), 1, height_ratios=[_panel_height(panel) for panel in column])
        for row, panel in zip(rows, column, strict=True):
            _draw_panel(figure.add_subplot(row), panel)
    handles = [
        Line2D([], [], linewidth=0, marker=dot, color=colour, markerfacecolor=fill, markersize=7, label=name)
        for name, (colour, fill, dot) in LEGEND.items()
    ]
    handles.append(Line2D([], [], color=TEXT, linewidth=1.2, label="parity"))
    handles.append(Line2D([], [], color=GOAL, linewidth=0, marker="|", markersize=12, mew=2.5, label="goal"))
    subject = "Medians of ratios within a round; several dots are several sizes or presets."
    add_caption(figure, summarize_figures(results), subject, source, handles)
    return figure


def summarize_figures(results: Mapping[str, Result]) -> str:
    """Summarize the picture in one line: a training step and its peers', if measured."""
    for name, result in sorted(results.items()):
        own, others = ([slow for slow in _slowdowns(result).values() if slow[1] is look] for look in (NPUZERO, PEER))
        if name.startswith("peers/") and own and others:
            ours, theirs = (_range_text([value for value, _ in found]) for found in (own, others))
            step = f"A training step ({_step_kind(result)}) takes"
            return f"{step} {ours} times compute's under npuzero, {theirs} under its peers"
    return "npuzero's figures, and their goals"


def kernel_panels(results: Mapping[str, Result]) -> list[FigurePanel]:
    """Return a panel for each group with figures."""
    panels = [
        FigurePanel("Ops", figure_rows(results, "ops"), "times as fast as torch or DeepSpeed", "right"),
        FigurePanel("Ops, of memory's bandwidth", figure_rows(results, "share"), "share of a plain pass", "right"),
        FigurePanel(
            "Collectives, shared memory, 16–64 MiB",
            figure_rows(results, "comm"),
            "times as fast as gloo or DeepSpeed",
            "right",
            logarithmic=True,
            note="in place",
        ),
        FigurePanel(
            "A training step, presets", figure_rows(results, "step"), "time over ranks that compute alone", "left"
        ),
    ]
    return [panel for panel in panels if panel.rows]


def figure_rows(results: Mapping[str, Result], group: str) -> list[PanelRow]:
    """Return a row for each available ratio of ``group``; both ways of a collective share one."""
    found: dict[str, PanelRow] = {}
    for figure in FIGURES:
        timed = figure.group == group and (figure.presets or group != "step")  # exclude the memory of a step
        values = figure.measured(results) if timed else []
        if not values:
            continue
        name, ways = figure.name.removesuffix(_WAY), group == "comm"
        look = SLOTS if ways and name == figure.name else NPUZERO
        dots = {**(found[name].dots if name in found else {}), look: values}
        found[name] = PanelRow(name, dots, figure.goal, _range_text(values))
    return list(found.values())


def peer_panels(results: Mapping[str, Result]) -> list[FigurePanel]:
    """Return a panel for each comparison with peers, fastest first."""
    panels = []
    for name, result in sorted(results.items()):
        if name.startswith("peers/"):
            slow = _slowdowns(result)
            rows = [
                PanelRow(
                    contender_label(who),
                    {slow[who][1]: [slow[who][0]]},
                    note=f"{slow[who][0]:.2f}   {_format_peak(result, who)}",
                )
                for who in sorted(slow, key=lambda who: slow[who][0])
            ]
            title = f"{_step_kind(result)}, beside peers"
            panels.append(FigurePanel(title, rows, f"time over {result.baseline}", "left", note="time   MB a rank"))
    return panels


def describe_machine(machine: Mapping[str, Any] | None) -> str:
    """Describe the machine of a record in one line; empty if unknown."""
    if machine is None:
        return ""
    facts = f"{machine['cpu']}, {machine['cores']} cores; torch {machine['torch']}"
    return f"Measured on {facts}; commit {machine['commit'] or 'of a release'}."


def _slowdowns(result: Result) -> dict[str, tuple[float, Look]]:
    """Return each contender's slowdown relative to the baseline, and its look."""
    return {
        name: (result.slowdown(name).median, NPUZERO if name.startswith("npuzero") else PEER)
        for name in result.seconds
        if name != result.baseline
    }


def _step_kind(result: Result) -> str:
    return result.title.removeprefix("training step, ")


def _format_peak(result: Result, name: str) -> str:
    looked = result.values[name]
    return f"{(looked['peak_bytes'] - looked['base_bytes']) / 1e6:.0f}" if "peak_bytes" in looked else "–"


def _range_text(values: Sequence[float]) -> str:
    least, most = f"{min(values):.2f}", f"{max(values):.2f}"
    return least if least == most else f"{least}–{most}"


def _panel_height(panel: FigurePanel) -> float:
    return len(panel.rows) * _ROW_INCHES + _PANEL_INCHES


def _draw_panel(axes: Axes, panel: FigurePanel) -> None:
    """Draw one panel: dots and their ranges, goals, the line of parity, notes on the right."""
    for place, row in enumerate(panel.rows):
        for (colour, fill, dot), values in row.dots.items():
            axes.plot([min(values), max(values)], [place, place], color=colour, linewidth=1.6, zorder=2)
            looks = {"color": colour, "markerfacecolor": fill, "markersize": 6.5}
            axes.plot(values, [place] * len(values), dot, zorder=4, clip_on=False, **looks)
        if row.goal is not None:
            axes.plot([row.goal] * 2, [place - 0.38, place + 0.38], color=GOAL, linewidth=2.5, zorder=3)
        where = {"xycoords": ("axes fraction", "data"), "textcoords": "offset points"}
        axes.annotate(row.note, (1, place), xytext=(8, 0), va="center", fontsize=9, annotation_clip=False, **where)
    axes.annotate(panel.note, (1, 1), (8, 3), "axes fraction", "offset points", fontsize=9, color=FAINT)
    axes.set_yticks(range(len(panel.rows)), [row.label for row in panel.rows], fontsize=10)
    axes.set_ylim(len(panel.rows) - 0.4, -0.6)
    axes.axvline(1.0, color=TEXT, linewidth=1.2, zorder=1)
    if panel.logarithmic:
        axes.set_xscale("log", base=2)
        axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axes.margins(x=0.06)
    axes.grid(axis="x")
    axes.spines["left"].set_visible(False)
    axes.tick_params(axis="y", length=0)
    axes.tick_params(axis="x", labelsize=9)
    scale = ", log scale" if panel.logarithmic else ""
    axes.set_xlabel(f"{panel.axis}{scale} · {_BETTER[panel.better]}", fontsize=10)
    axes.set_title(panel.title, pad=16 if panel.note else None)


_BETTER = {"right": "right is better →", "left": "← left is better"}


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("records", type=Path, nargs="+", help="of benchmarks.peers.nvme and benchmarks.highwater")
    parser.add_argument("--out", type=Path, required=True, metavar="FILE", help="for the picture")
    options = parser.parse_args(arguments)
    records = [Record.read(path) for path in options.records]
    results = {result.name: result for record in records for result in record.results}
    tiers.plot_tiers(results, options.out, describe_records(records, set(results)))


if __name__ == "__main__":
    main()
