"""The picture of training with states on a disk: cost per step of each contender, and memory over the steps.

python -m benchmarks.plot benchmarks/results/nvme-*.json benchmarks/results/highwater.json --out docs/nvme.png
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from benchmarks.goals import added_seconds, find_exact_contender
from npuzero.bench import Result
from npuzero.cli.output.palette import FAINT, GOAL, OTHER, OWN, PARTS, STYLE, TEXT, add_caption

STEP, WATER = "nvme/step-", "highwater"
#: Contenders by the names that their users know.
CALLED = {
    "npuzero-8bit": "npuzero, 8-bit states",
    "npuzero-split": "npuzero, split masters",
    "npuzero": "npuzero",
    "deepspeed": "DeepSpeed, stage 3",
    "mapped": "torch, memory-mapped",
    "mapped-dropped": "torch, memory-mapped,\nblock by block",
}
#: Goal for competitors' seconds, in multiples of npuzero's.
BEHIND = {"deepspeed": 2.0, "mapped": 3.0, "mapped-dropped": 3.0}
_BAR_INCHES, _PANEL_INCHES, _HEAD_INCHES, _LEAST_INCHES = 0.42, 1.0, 1.3, 3.2


def plot_tiers(results: Mapping[str, Result], path: Path, source: str = "") -> None:
    """Draw the picture of ``results`` into the file ``path``."""
    with plt.rc_context(STYLE):
        figure = draw_tiers(results, source)
        figure.savefig(path, dpi=150)
        plt.close(figure)


def draw_tiers(results: Mapping[str, Result], source: str = "") -> Figure:
    """Return a panel for each precision's steps, and one of memory, if available."""
    steps = [result for name, result in sorted(results.items(), reverse=True) if name.startswith(STEP)]
    water = results.get(WATER)
    heights = [_PANEL_INCHES + _BAR_INCHES * len(drawn_costs(result)) for result in steps]
    columns = bool(steps) + (water is not None)
    inches = max(sum(heights), _LEAST_INCHES) + _HEAD_INCHES
    figure = plt.figure(figsize=(6.7 * columns, inches), layout="constrained")
    places = iter(figure.add_gridspec(1, columns, wspace=0.04))
    if steps:
        rows = next(places).subgridspec(len(steps), 1, height_ratios=heights)
        for row, result in zip(rows, steps, strict=True):
            _draw_costs(figure.add_subplot(row), result)
    if water is not None:
        _draw_memory(figure.add_subplot(next(places)), water)
    handles = [Patch(color=OWN, label="npuzero"), Patch(color=OTHER, label="others")]
    handles.append(Line2D([], [], color=GOAL, linewidth=0, marker="|", markersize=12, mew=2.5, label="goal, at least"))
    subject = "Seconds of a step beyond computing alone, one disk; medians of rounds."
    add_caption(figure, summarize_tiers(results), subject, source, handles if steps else ())
    return figure


def drawn_costs(result: Result) -> dict[str, float]:
    """Return the seconds that drawn contenders add to a step."""
    found = added_seconds(result)
    return {name: found[name] for name in CALLED if name in found}


def cost_ratios(result: Result) -> dict[str, float]:
    """Return the seconds added by competitors, in multiples of npuzero's."""
    found = added_seconds(result)
    own = found.get(find_exact_contender(result))
    return {} if own is None else {name: found[name] / own for name in BEHIND if name in found}


def summarize_tiers(results: Mapping[str, Result]) -> str:
    """Summarize the picture in one line."""
    times = [
        value for name, result in results.items() if name.startswith(STEP) for value in cost_ratios(result).values()
    ]
    if times:
        least, most = min(times), max(times)
        span = f"{least:.1f}" if f"{least:.1f}" == f"{most:.1f}" else f"{least:.1f} to {most:.1f}"
        return f"States on a disk cost others {span} times as much"
    if WATER in results:
        values = results[WATER].values["npuzero"]
        return (
            f"Memory of {values['peak_bytes'] / 1e6:.0f} MB at the most, states of {values['states_bytes'] / 1e6:.0f}"
        )
    return "Training with states on a disk"


def _draw_costs(axes: Axes, result: Result) -> None:
    """Draw a bar for each contender, with its goal."""
    seconds, times = drawn_costs(result), cost_ratios(result)
    own = seconds.get(find_exact_contender(result))
    for place, (name, value) in enumerate(seconds.items()):
        axes.barh(place, value, height=0.62, color=OTHER if name in BEHIND else OWN)
        note = f"{value:.2f} s" + (f", {times[name]:.1f} times" if name in times else "")
        axes.annotate(note, (value, place), (5, 0), textcoords="offset points", va="center", fontsize=9)
        if own is not None and name in BEHIND:
            axes.plot([BEHIND[name] * own] * 2, [place - 0.38, place + 0.38], color=GOAL, linewidth=2.5)
    axes.set_yticks(range(len(seconds)), [CALLED[name] for name in seconds], fontsize=10)
    axes.set_ylim(len(seconds) - 0.4, -0.6)
    axes.margins(x=0.3)
    axes.set_xlim(left=0)
    axes.grid(axis="x")
    axes.tick_params(axis="y", length=0)
    axes.set_xlabel("seconds · ← left is better", fontsize=10)
    axes.set_title(f"What states on a disk add to a step, {result.parameters['precision']}")


def _draw_memory(axes: Axes, result: Result) -> None:
    """Draw the process's memory after each step, its cap, and the plan."""
    values, mb = result.values["npuzero"], 1e-6
    held = [nbytes * mb for nbytes in values["held_bytes"]]
    axes.plot(range(1, len(held) + 1), held, color=OWN, label=f"held, at most {values['peak_bytes'] * mb:.0f} MB")
    lines = {
        f"states on the disk, {values['states_bytes'] * mb:.0f} MB": (values["states_bytes"], PARTS["states"], "--"),
        f"cap, {values['cap_bytes'] * mb:.0f} MB": (values["cap_bytes"], GOAL, "-"),
        "imports and plan": (values["base_bytes"] + values["plan_bytes"], TEXT, ":"),
        "imports": (values["base_bytes"], FAINT, ":"),
    }
    for label, (nbytes, colour, dashes) in lines.items():
        axes.axhline(nbytes * mb, color=colour, linestyle=dashes, linewidth=1.4, label=label)
    axes.set(xlabel="step", ylabel="MB in memory", title="Memory of the process", ylim=(0, None))
    axes.set_ylim(top=1.45 * axes.get_ylim()[1])  # room for the legend
    axes.grid(axis="y")
    axes.legend(loc="upper right", fontsize=9, ncols=2)
