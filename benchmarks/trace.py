"""Draw one training step of each rank from a Chrome trace, to see what runs beside what::

    python -m benchmarks.step --presets zero3 --batch 1 --rounds 1 --trace build/step.json
    python -m benchmarks.trace build/step.json --out docs/overlap.png

The trace itself opens in Perfetto or chrome://tracing, with every span's name and facts.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

# Rows from the top, and the spans drawn in each: by name for the loop's own, by category for the engine's.
PHASES = {"forward": "#4c78a8", "backward": "#72a0c8", "update": "#9ecae9"}
ROWS = {
    "computing": PHASES,
    "waiting": {"wait for gather": "#c44e52", "wait for restore": "#c44e52"},
    "gathering": {"comm gather": "#59a14f"},
    "reducing": {"comm reduce": "#f28e2b"},
    "norm, votes": {"comm control": "#9c755f"},
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("trace", type=Path, help="what benchmarks.step --trace wrote")
    parser.add_argument("--out", type=Path, required=True, help="the picture, .png or .svg")
    options = parser.parse_args()
    draw(last_step(json.loads(options.trace.read_text("utf-8"))["traceEvents"]), options.out)


def last_step(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The spans that touch the trace's last step, from the first rank's forward to the last one's update."""
    spans = [event for event in events if event["ph"] == "X"]
    steps: dict[int, tuple[float, float]] = {}
    for rank in {span["pid"] for span in spans}:
        own = [span for span in spans if span["pid"] == rank and span["cat"] == "step"]
        last = {name: max((s for s in own if s["name"] == name), key=lambda s: float(s["ts"])) for name in PHASES}
        steps[rank] = last["forward"]["ts"], last["update"]["ts"] + last["update"]["dur"]
    begin, end = min(first for first, _ in steps.values()), max(last for _, last in steps.values())
    return [
        {**span, "ts": (span["ts"] - begin) / 1000, "dur": span["dur"] / 1000}
        for span in spans
        if span["ts"] + span["dur"] > begin and span["ts"] < end
    ]


def draw(spans: list[dict[str, Any]], out: Path) -> None:
    """A band for each rank, a row for each kind of work; milliseconds from the step's begin."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    ranks = sorted({span["pid"] for span in spans})
    figure, axes = plt.subplots(len(ranks), 1, figsize=(11, 0.6 + 1.7 * len(ranks)), sharex=True, squeeze=False)
    end = max(span["ts"] + span["dur"] for span in spans if span["cat"] == "step" and span["name"] in PHASES)
    for rank, axis in zip(ranks, axes[:, 0], strict=True):
        for row, (_, kinds) in enumerate(ROWS.items()):
            for span in spans:
                colour = kinds.get(span["name"] if span["cat"] == "step" else span["cat"])
                if span["pid"] == rank and colour:
                    axis.broken_barh([(span["ts"], span["dur"])], (row - 0.4, 0.8), color=colour, linewidth=0)
                    if span["cat"] == "step" and span["dur"] > end / 20:
                        middle = max(span["ts"], 0) + span["dur"] / 2
                        axis.text(middle, row, span["name"], ha="center", va="center", color="white", fontsize=9)
        axis.set_yticks(range(len(ROWS)), list(ROWS), fontsize=9)
        axis.invert_yaxis()
        axis.set_xlim(0, end)
        axis.set_title(f"rank {rank}", loc="left", fontsize=10)
        axis.spines[["top", "right", "left"]].set_visible(False)
        axis.tick_params(axis="y", length=0)
        axis.grid(axis="x", color="#dddddd", linewidth=0.6)
        axis.set_axisbelow(True)
    axes[-1, 0].set_xlabel("ms")
    figure.tight_layout()
    figure.savefig(out, dpi=130, facecolor="white")
    plt.close(figure)


if __name__ == "__main__":
    main()
