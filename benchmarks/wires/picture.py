"""The picture of a step over a slow link: seconds by the link's rate, a line for each plan.

python -m benchmarks.wires.picture benchmarks/results/wires-*.json --out docs/wires.png
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path

from matplotlib.ticker import NullLocator

from benchmarks.contenders import describe_records
from benchmarks.plot import Axes, Figure, Line2D, plt  # first: it chooses matplotlib's backend
from npuzero.bench import Record, Result
from npuzero.cli.output.palette import CURVES, FAINT, OTHER, STYLE, add_caption

OWN, BESIDE = "npuzero thin", "npuzero hpz"
#: The drawn position of an unlimited link, in Gbit/s.
_BEYOND = 100.0
_PANELS = {
    "namespaces": "Gloo between network namespaces",
    "shared": "Shared memory, links kept count of",
}


def plot_wires(results: Sequence[Result], path: Path, source: str = "") -> None:
    """Draw the picture of ``results`` into the file ``path``."""
    with plt.rc_context(STYLE):
        figure = draw_wires(results, source)
        figure.savefig(path, dpi=150)
        plt.close(figure)


def draw_wires(results: Sequence[Result], source: str = "") -> Figure:
    """Return the picture: a panel for each kind of link, a line for each contender."""
    kinds = [kind for kind in _PANELS if any(result.parameters["links"] == kind for result in results)]
    figure, panels = plt.subplots(
        1, len(kinds), figsize=(6.2 * len(kinds), 5), sharey=True, squeeze=False, layout="constrained"
    )
    names = list(dict.fromkeys(name for result in results for name in result.seconds))
    looks = _line_styles(names)
    for kind, axes in zip(kinds, panels[0], strict=True):
        _draw_wire_panel(axes, kind, [result for result in results if result.parameters["links"] == kind], looks)
    panels[0, 0].set_ylabel("seconds of a step, log scale · lower is better")
    handles = [Line2D([], [], **looks[name], label=name) for name in names]
    sizes = results[0].parameters
    subject = f"The demo's GPT, {sizes['precision']}, two nodes of two ranks; medians of rounds."
    add_caption(figure, summarize_wires(results), subject, source, handles)
    return figure


def summarize_wires(results: Sequence[Result]) -> str:
    """Summarize the picture in one line: thin against hpz at 1 Gbit/s, if both were measured."""
    for result in results:
        if result.parameters["gbit_per_s"] == 1 and {OWN, BESIDE} <= result.seconds.keys():
            fast = result.speedup(OWN, BESIDE).median
            return f"Over 1 Gbit/s a step of thin is {fast:.1f} times as fast as one of hpz"
    return "Steps over a slow link"


def rate_points(results: Sequence[Result], name: str) -> list[tuple[float, float]]:
    """Return the rates in Gbit/s at which ``name`` was measured, ascending, with its median seconds."""
    there = [result for result in results if name in result.seconds]
    found = [(result.parameters["gbit_per_s"] or _BEYOND, statistics.median(result.seconds[name])) for result in there]
    return sorted(found)


def _draw_wire_panel(axes: Axes, kind: str, results: Sequence[Result], looks: Mapping[str, dict[str, object]]) -> None:
    for name, look in looks.items():
        if found := rate_points(results, name):
            axes.plot(*zip(*found, strict=True), marker="o", markersize=5, **look)
    axes.set(xscale="log", yscale="log", title=_PANELS[kind], xlabel="Gbit/s of the link, each way, log scale")
    rates = sorted({result.parameters["gbit_per_s"] or _BEYOND for result in results})
    axes.set_xticks(rates, ["no limit" if rate == _BEYOND else f"{rate:g}" for rate in rates], minor=False)
    axes.xaxis.set_minor_locator(NullLocator())
    for format_ in (axes.yaxis.set_major_formatter, axes.yaxis.set_minor_formatter):
        format_(lambda value, _: f"{value:g}" if f"{value:.0e}"[0] in "125" else "")
    axes.grid(axis="both")


def _line_styles(names: Sequence[str]) -> dict[str, dict[str, object]]:
    """Return colour and dashes of each: npuzero's plans use the palette's curves, competitors are grey."""
    curves, greys = iter(CURVES), iter(((OTHER, "-"), (FAINT, (0, (3, 1))), (FAINT, (0, (1.4, 0.9)))))
    found = {}
    for name in names:
        colour, dashes = next(curves if name.startswith("npuzero") else greys)
        found[name] = {"color": colour, "linestyle": dashes, "linewidth": 1.8}
    return found


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("records", type=Path, nargs="+", help="of benchmarks.wires")
    parser.add_argument("--out", type=Path, required=True, metavar="FILE", help="for the picture")
    options = parser.parse_args(arguments)
    records = [Record.read(path) for path in options.records]
    results = [result for record in records for result in record.results]
    plot_wires(results, options.out, describe_records(records, {result.name for result in results}))


if __name__ == "__main__":
    main()
