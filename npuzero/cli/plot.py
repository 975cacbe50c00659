"""The picture of ``npuzero plan --plot``; matplotlib is imported only here, and only when a picture is asked for."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from npuzero.cli.table import unit_for
from npuzero.errors import ConfigError, StorageError
from npuzero.plan import Report

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# Okabe and Ito's palette: told apart by colour-blind readers too.
_COLOURS = {
    "parameters": "#0072B2",
    "gradients": "#E69F00",
    "states": "#009E73",
    "buffers": "#B0B0B0",
    "all_gather": "#0072B2",
    "reduce_scatter": "#E69F00",
    "all_reduce": "#D55E00",
    "all_to_all": "#CC79A7",
    "control": "#B0B0B0",
}


def plot(path: Path, title: str, reports: dict[str, Report], memory_bytes: int | None = None) -> None:
    """Draws memory per rank and traffic per step as stacked bars, one per preset; a rank's memory as a line.

    Raises:
        ConfigError: matplotlib is missing, or does not know the file's format.
        StorageError: the file cannot be written.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ConfigError("--plot", expected="matplotlib", got=str(error), do="Run: pip install matplotlib") from error
    figure = Figure(figsize=(12, 5), layout="constrained")
    figure.suptitle(title, fontsize=11)
    left, right = figure.subplots(1, 2)
    unit_bytes = _bars(left, "Memory per rank", {name: report.bytes_held for name, report in reports.items()})
    if memory_bytes:
        left.axhline(memory_bytes / unit_bytes, color="#D55E00", linestyle="--", linewidth=1)
    _bars(right, "Sent per rank and step", {name: report.bytes_sent for name, report in reports.items()})
    try:
        figure.savefig(path, dpi=150)
    except ValueError as error:
        raise ConfigError("--plot", expected="a picture's file name", got=str(error), do="Name it *.png.") from error
    except OSError as error:
        raise StorageError(
            f"picture {path}", expected="a file that can be written", got=str(error), do="Check the folder."
        ) from error


def _bars(axes: Axes, title: str, rows: dict[str, dict[str, int]]) -> int:
    """Draws one side; the bytes of its unit."""
    totals = {name: sum(values.values()) for name, values in rows.items()}
    unit, unit_bytes = unit_for(max(totals.values()))
    bottoms = dict.fromkeys(rows, 0.0)
    for part in dict.fromkeys(part for values in rows.values() for part in values):
        heights = [rows[name].get(part, 0) / unit_bytes for name in rows]
        axes.bar(list(rows), heights, bottom=list(bottoms.values()), label=part, color=_COLOURS[part], width=0.72)
        bottoms = {name: bottoms[name] + height for name, height in zip(rows, heights, strict=True)}
    for place, (name, total) in enumerate(bottoms.items()):
        if totals[name]:
            axes.annotate(f"{total:.3g}", (place, total), (0, 3), textcoords="offset points", ha="center", fontsize=9)
    axes.set_title(f"{title}, {unit}", fontsize=11, loc="left")
    axes.set_ylim(0, 1.1 * max(bottoms.values()) or 1)
    axes.set_xticks(range(len(rows)), list(rows), rotation=30, ha="right")
    axes.grid(axis="y", color="#E0E0E0", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, fontsize=9, ncols=4, loc="upper center", bbox_to_anchor=(0.5, -0.2))
    return unit_bytes
