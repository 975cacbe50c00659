"""The picture: losses, and how far each curve's mean is from fp32's, in its band."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.plot import GRID, OTHER, STYLE, TEXT, plt  # first: it chooses matplotlib's backend
from benchmarks.precision.curves import AFTER, BASELINE, CONTENDERS, WINDOW, smoothed


def plot(curves: Mapping[str, Any], path: Path) -> None:
    """Draws all curves that there are."""
    names = [name for name in CONTENDERS if name in curves]
    colours = {name: OTHER if name == BASELINE else f"C{i}" for i, name in enumerate(names)}
    with plt.style.context(STYLE):
        figure, (losses, far) = plt.subplots(1, 2, figsize=(11, 4), layout="constrained")
        base = smoothed(curves[BASELINE]["losses"])
        steps = range(WINDOW, WINDOW + len(base))
        for name in names:
            mean, wide = smoothed(curves[name]["losses"]), name == BASELINE
            losses.plot(steps, mean, color=colours[name], linewidth=4 if wide else 1, label=name)
            if not wide:
                far.plot(steps, [own - other for own, other in zip(mean, base, strict=True)], color=colours[name])
        bands = sorted({CONTENDERS[name].band for name in names} - {0.0})
        for band in bands:
            for edge in (band, -band):
                far.hlines(edge, AFTER + WINDOW, steps[-1], color=TEXT, linestyle=":", linewidth=1)
        losses.set(xlabel="step", ylabel="nats per byte", title=f"training loss, means over {WINDOW} steps")
        far.set(xlabel="step", title="distance from fp32, and the bands", ylim=(-1.5 * bands[-1], 1.5 * bands[-1]))
        for axes in (losses, far):
            axes.grid(axis="y", color=GRID)
        figure.legend(loc="outside lower center", ncols=4, frameon=False)
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, dpi=150, transparent=True)
        plt.close(figure)
