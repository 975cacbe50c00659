"""The picture of ``npuzero plan --plot``. Imports matplotlib only here, and only if a picture is requested."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from npuzero.cli.output.palette import FARTHER, GOAL, NAMES, PAPER, PARTS, SENT, STYLE, TEXT, add_caption
from npuzero.cli.output.table import choose_byte_unit, format_bytes
from npuzero.errors import ConfigError, StorageError
from npuzero.plan import Memory, Report

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_SOURCE = "Arithmetic of npuzero plan; nothing was run."
_ON_TOP = "Activations come on top of this memory."
_VISIBLE = 0.001  # of the longest bar: parts that are narrower everywhere are omitted from the legend


def plot_reports(path: Path, title: str, reports: Mapping[str, Report], memory_bytes: int | None = None) -> None:
    """Draw memory per rank and bytes sent per step into the file ``path``, one row per preset.

    Args:
        path: the picture; its ending determines the format.
        title: the model and the run.
        reports: by preset.
        memory_bytes: of a rank, drawn as a line.

    Raises:
        ConfigError: matplotlib is missing, or does not know the file's format.
        StorageError: the file cannot be written.
    """
    try:
        import matplotlib
        import matplotlib.figure  # noqa: F401 - draw() takes it
    except ImportError as error:
        raise ConfigError("--plot", expected="matplotlib", got=str(error), do="Run: pip install matplotlib") from error
    with matplotlib.rc_context(STYLE):
        figure = draw_reports(title, reports, memory_bytes)
    try:
        figure.savefig(path, dpi=150)
    except ValueError as error:
        raise ConfigError("--plot", expected="a picture's file name", got=str(error), do="Name it *.png.") from error
    except OSError as error:
        raise StorageError(
            f"picture {path}", expected="a file that can be written", got=str(error), do="Check the folder."
        ) from error


def draw_reports(title: str, reports: Mapping[str, Report], memory_bytes: int | None = None) -> Figure:
    """Draw stacked bars: memory by part, offloaded memory if there is any, and bytes sent by collective."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 1.9 + 0.42 * len(reports)), layout="constrained")
    held = {name: report.held[Memory.DEVICE] for name, report in reports.items()}
    counted = any("activations" in parts for parts in held.values())
    add_caption(figure, summarize_reports(reports), title, _SOURCE if counted else f"{_ON_TOP} {_SOURCE}")
    farther = {name: {memory: report.memory[memory] for memory in FARTHER} for name, report in reports.items()}
    # The middle panel exists only if a row has offloaded parts; otherwise `middle` is empty.
    offload = any(any(row.values()) for row in farther.values())
    left, *middle, right = figure.subplots(1, 2 + offload, sharey=True, width_ratios=(1.25, *[0.8] * offload, 1))
    unit_bytes = _draw_bars(left, "Memory of a rank", held, PARTS, memory_bytes or 0)
    if memory_bytes:
        place = memory_bytes / unit_bytes
        left.axvline(place, color=GOAL, linestyle="--", linewidth=1.5)
        text = f"a rank has {format_bytes(memory_bytes)}"
        left.annotate(text, (place, 1), (4, 2), ("data", "axes fraction"), "offset points", color=GOAL, fontsize=9)
    for axes in middle:
        _draw_bars(axes, "Off the device", farther, FARTHER)
    _draw_bars(right, "Sent by a rank in a step", {name: report.bytes_sent for name, report in reports.items()}, SENT)
    return figure


def summarize_reports(reports: Mapping[str, Report]) -> str:
    """Summarize the picture in one line: the presets that hold the least and the most."""
    held = {name: report.memory[Memory.DEVICE.value] for name, report in reports.items()}
    least, most = min(held, key=held.__getitem__), max(held, key=held.__getitem__)
    if held[least] == held[most]:
        return f"Every preset holds {format_bytes(held[most])}: one rank has nobody to share with"
    return f"{least} holds {format_bytes(held[least])} a rank, {most} {format_bytes(held[most])}"


def _draw_bars(
    axes: Axes, what: str, rows: Mapping[str, Mapping[str, int]], colours: Mapping[str, str], least_bytes: int = 0
) -> int:
    """Draw one panel, at least ``least_bytes`` wide; return the bytes of its unit."""
    totals = {name: sum(values.values()) for name, values in rows.items()}
    most_bytes = max(*totals.values(), least_bytes)
    unit, unit_bytes = choose_byte_unit(most_bytes)
    lefts = dict.fromkeys(rows, 0.0)
    for part, colour in colours.items():
        widths = [values.get(part, 0) / unit_bytes for values in rows.values()]
        if max(widths) > _VISIBLE * most_bytes / unit_bytes:
            name = NAMES.get(part, part)
            axes.barh(list(rows), widths, 0.72, list(lefts.values()), label=name, color=colour, edgecolor=PAPER, lw=0.4)
        lefts = {name: left + width for name, left, width in zip(rows, lefts.values(), widths, strict=True)}
    for place, (name, total) in enumerate(lefts.items()):
        text = f"{total:.3g}" if totals[name] else "nothing"
        axes.annotate(text, (total, place), (4, 0), textcoords="offset points", va="center", color=TEXT, fontsize=9)
    axes.set(title=f"{what}, {unit}", xlim=(0, 1.12 * most_bytes / unit_bytes or 1))
    axes.set_yticks(range(len(rows)), list(rows))
    axes.set_ylim(len(rows) - 0.5, -0.5)
    axes.tick_params(axis="y", length=0)
    axes.grid(axis="x")
    if axes.get_legend_handles_labels()[0]:
        axes.legend(fontsize=9, ncols=5, loc="upper left", bbox_to_anchor=(-0.01, -0.07), handlelength=1.2)
    return unit_bytes
