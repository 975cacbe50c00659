"""Draw one training step of each rank from a Chrome trace, to show what overlaps::

    python -m benchmarks.step --presets zero3 --batch 1 --rounds 1 --trace benchmarks/results/trace/step.json
    python -m benchmarks.trace benchmarks/results/trace/step.json --out docs/overlap.png

For a pipeline, draw the planned schedule above the executed one::

    python -m benchmarks.pipeline --rounds 1 --trace runs/trace/pipeline.json
    python -m benchmarks.trace runs/trace/pipeline.json --out runs/trace/pipeline.png

The trace itself opens in Perfetto or chrome://tracing, with every span's name and facts.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from matplotlib.patches import Patch

from benchmarks.axes import schedule_picture
from benchmarks.plot import Axes, Figure, describe_machine, plt  # first: it chooses matplotlib's backend
from npuzero.cli.output.palette import PAPER, PARTS, STYLE, TEXT, WORK, add_caption, text_colour
from npuzero.errors import ConfigError
from npuzero.parallel.pipeline_parallel.schedule import PipelineSchedule, ScheduleTimeline, TimedAction, schedule

PHASES = ("forward", "backward", "update")
#: Waits of the training loop, by category. It computes in the rest of a phase: a wait is never both.
WAITS = ("wait for gather", "wait for restore", "comm control")
#: Work that overlaps with the loop, one row each: category of the spans, and colour of the data that travel.
COLLECTIVES = {
    "gathers": ("comm gather", PARTS["parameters"]),
    "reductions": ("comm reduce", PARTS["gradients"]),
    "votes, norm": ("comm control", PARTS["buffers"]),
}
LOOP = "the loop"
WAITING: dict[str, Any] = {"facecolor": WORK["waiting"], "edgecolor": TEXT, "hatch": "//////", "linewidth": 0}
_HEIGHT, _SMALL = 0.5, 8.5
_SEEN = 1 / 700  # of a step: shorter waits are counted, but too narrow to draw
_NEAR = 1 / 50  # of a step: waits this close to each other share a label


@dataclass(frozen=True)
class TraceSpan:
    """Describe a span of one rank, in milliseconds from the start of the step."""

    rank: int
    category: str
    name: str
    begin: float
    end: float

    @property
    def length(self) -> float:
        return self.end - self.begin


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("trace", type=Path, help="what benchmarks.step or benchmarks.pipeline wrote by --trace")
    parser.add_argument("--out", type=Path, required=True, help="the picture, .png or .svg")
    options = parser.parse_args(arguments)
    content = json.loads(options.trace.read_text("utf-8"))
    if planned := content.get("otherData", {}).get("schedule"):
        table = schedule(**planned)
        schedule_picture.plot_schedule(
            table, measured_timeline(content["traceEvents"], table), options.out, content["otherData"]
        )
        return
    with plt.rc_context(STYLE):
        figure = draw_trace(last_step(content["traceEvents"]), content.get("otherData", {}))
        figure.savefig(options.out, dpi=150)
        plt.close(figure)


def measured_timeline(events: Iterable[Mapping[str, Any]], table: PipelineSchedule) -> ScheduleTimeline:
    """Return the execution times of a trace's last pipeline step, in seconds, on the first rank of each stage.

    An action begins when its input has arrived; until then its rank waits.

    Raises:
        ConfigError: an action of the schedule is not in the trace.
    """
    found = sorted((event for event in events if event["ph"] == "X"), key=lambda event: float(event["ts"]))
    last = {(event["pid"], event["name"]): event for event in found}
    # The ranks of a stage are adjacent: pipe is the outermost axis.
    shared = len({event["pid"] for event in found if event["cat"] == "pipeline"}) // table.ranks
    acts = []
    for rank, row in enumerate(table.table):
        for act in row:
            name, pid = f"{act.kind} {act.stage} #{act.micro}", rank * shared
            if (pid, name) not in last:
                raise ConfigError("trace", expected=f"{name!r} on rank {pid}", got="none", do="Take the trace anew.")
            begin, end = _span_seconds(last[pid, name])
            before = act.stage - 1 if act.kind == "F" else act.stage + 1
            came = last.get((pid, f"stage {before}>{act.stage} #{act.micro}"))
            acts.append(
                TimedAction(
                    rank, act, begin if came is None or act.kind == "W" else max(begin, _span_seconds(came)[1]), end
                )
            )
    return ScheduleTimeline(tuple(acts))


def _span_seconds(event: Mapping[str, Any]) -> tuple[float, float]:
    """Return a span's begin and end in seconds."""
    return event["ts"] / 1e6, (event["ts"] + event["dur"]) / 1e6


def last_step(events: Iterable[Mapping[str, Any]]) -> list[TraceSpan]:
    """Return the spans that intersect the trace's last step, from the first rank's forward to the last one's update."""
    found = [event for event in events if event["ph"] == "X"]
    phases = [event for event in found if event["cat"] == "step" and event["name"] in PHASES]
    # Ranks drift against each other: the step spans from its first begin to its last end on any rank.
    ranks = {event["pid"] for event in phases}
    last = [
        max((e for e in phases if e["pid"] == rank and e["name"] == phase), key=lambda e: float(e["ts"]))
        for rank in ranks
        for phase in PHASES
    ]
    begin, end = min(event["ts"] for event in last), max(event["ts"] + event["dur"] for event in last)
    return [
        TraceSpan(e["pid"], e["cat"], e["name"], max(0.0, e["ts"] - begin) / 1000, (e["ts"] + e["dur"] - begin) / 1000)
        for e in found
        if begin < e["ts"] + e["dur"] and e["ts"] < end and (e["cat"] != "step" or e in last)
    ]


def subtract_spans(span: TraceSpan, gaps: Iterable[TraceSpan]) -> list[tuple[float, float]]:
    """Return the parts of ``span`` outside ``gaps``, as begin and end."""
    parts, begin = [], span.begin
    for gap in sorted(gaps, key=lambda gap: gap.begin):
        if gap.end <= begin or gap.begin >= span.end:
            continue
        if gap.begin > begin:
            parts.append((begin, gap.begin))
        begin = gap.end
    return [*parts, (begin, span.end)] if begin < span.end else parts


def merge_near_spans(spans: Iterable[TraceSpan], near: float) -> list[tuple[float, float]]:
    """Merge spans that follow each other within ``near`` milliseconds; return their middles and total lengths."""
    found: list[list[TraceSpan]] = []
    for span in sorted(spans, key=lambda span: span.begin):
        if found and span.begin - found[-1][-1].end < near:
            found[-1].append(span)
        else:
            found.append([span])
    return [((group[0].begin + group[-1].end) / 2, sum(span.length for span in group)) for group in found]


def waiting_ms(spans: Iterable[TraceSpan]) -> float:
    """Return the milliseconds that the loop waits."""
    return sum(span.length for span in spans if span.category in WAITS)


def communicating_ms(spans: Iterable[TraceSpan]) -> float:
    """Return the milliseconds that collectives run."""
    kinds = {category for category, _ in COLLECTIVES.values()}
    return sum(span.length for span in spans if span.category in kinds)


def summarize_trace(spans: Sequence[TraceSpan]) -> str:
    """Summarize the picture in one line."""
    hidden = max(0.0, 1 - waiting_ms(spans) / communicating_ms(spans))
    return f"{hidden:.0%} of communication runs beside compute; for the rest the loop waits"


def draw_trace(spans: Sequence[TraceSpan], facts: Mapping[str, Any]) -> Figure:
    """Return the picture: a band per rank, with a row for its loop and one per kind of collective.

    Args:
        spans: of one step.
        facts: ``title`` and ``machine`` of the run, if known.
    """
    ranks = sorted({span.rank for span in spans})
    figure, bands = plt.subplots(
        len(ranks), 1, figsize=(12, 1.5 + 2.1 * len(ranks)), sharex=True, squeeze=False, layout="constrained"
    )
    end = max(span.end for span in spans if span.category == "step")
    for rank, axes in zip(ranks, bands[:, 0], strict=True):
        _draw_rank(axes, [span for span in spans if span.rank == rank], end)
        own = [span for span in spans if span.rank == rank]
        axes.set_title(
            f"Rank {rank}: {communicating_ms(own):.0f} ms of collectives, {waiting_ms(own):.0f} ms waited for"
        )
    bands[-1, 0].set_xlabel("ms from the step's start · numbers: the blocks whose parameters or gradients travel")
    legend = [
        Patch(color=WORK["compute"], label="the loop computes"),
        Patch(label="the loop waits", **WAITING),
        Patch(color=PARTS["parameters"], label="parameters travel (all_gather)"),
        Patch(color=PARTS["gradients"], label="gradients travel (reduce_scatter)"),
    ]
    add_caption(figure, summarize_trace(spans), facts.get("title", ""), describe_machine(facts.get("machine")), legend)
    return figure


def _draw_rank(axes: Axes, spans: Sequence[TraceSpan], end: float) -> None:
    """Draw one rank."""
    waits = [span for span in spans if span.category in WAITS and span.length > end * _SEEN]
    above = [(middle, f"wait {length:.0f} ms") for middle, length in merge_near_spans(waits, end * _NEAR)]
    for phase in (span for span in spans if span.category == "step"):
        parts = [(begin, until - begin) for begin, until in subtract_spans(phase, waits)]
        axes.broken_barh(parts, (-_HEIGHT / 2, _HEIGHT), color=WORK["compute"], linewidth=0)
        axes.vlines(phase.end, -_HEIGHT / 2, _HEIGHT / 2, color=PAPER, linewidth=2)
        # A phase is labelled inside its longest part without a wait, or above it if that part is too short.
        begin, length = max(parts, key=lambda part: part[1])
        if length > end / 18:
            look = {"ha": "center", "va": "center_baseline", "color": text_colour(WORK["compute"]), "fontsize": 10}
            axes.text(begin + length / 2, 0, phase.name, **look)
        else:
            above.append(_place_label(phase, phase.name))
    where = [(span.begin, span.length) for span in waits]
    axes.broken_barh(where, (-_HEIGHT / 2, _HEIGHT), **WAITING)
    _draw_labels(axes, 0, above, end)
    for row, (category, colour) in enumerate(COLLECTIVES.values(), 1):
        kind = [span for span in spans if span.category == category]
        where = [(span.begin, max(span.length, end * _SEEN)) for span in kind]
        axes.broken_barh(where, (row - _HEIGHT / 2, _HEIGHT), color=colour, linewidth=0)
        _draw_labels(axes, row, [_place_label(span, short_span_name(span.name)) for span in kind], end)
    axes.set_yticks(range(1 + len(COLLECTIVES)), [LOOP, *COLLECTIVES])
    axes.set(xlim=(0, end * 1.005), ylim=(len(COLLECTIVES) + 0.45, -0.75))
    axes.spines["left"].set_visible(False)
    axes.tick_params(axis="y", length=0)
    axes.grid(axis="x")


def short_span_name(name: str) -> str:
    """Return a span's name without the part that its row states: ``"gather blocks.3"`` becomes ``"3"``."""
    return {"parameters in use": "vote", "gradient norm": "norm"}.get(
        name, name.rpartition(" ")[2].partition("[")[0].rpartition(".")[2]
    )


def _place_label(span: TraceSpan, text: str) -> tuple[float, str]:
    return (span.begin + span.end) / 2, text


def _draw_labels(axes: Axes, row: int, labels: Iterable[tuple[float, str]], end: float) -> None:
    """Write a row's labels above its bars. Overlapping labels move right; none leaves the axes."""
    placed, free = [], 0.0
    for x, text in sorted(labels):
        width = end * (0.004 + 0.0064 * len(text))
        placed.append((max(x, free + width / 2), width, text))
        free = placed[-1][0] + width / 2
    limit = end * 1.005
    for x, width, text in reversed(placed):
        place = min(x, limit - width / 2)
        limit = place - width / 2
        axes.text(place, row - _HEIGHT / 2 - 0.04, text, ha="center", va="bottom", color=TEXT, fontsize=_SMALL)


if __name__ == "__main__":
    main()
