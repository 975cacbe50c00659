"""The picture of a pipeline step: the planned schedule above the executed one, with a box for each action."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from statistics import median
from typing import Any

from matplotlib.patches import Patch

from benchmarks.plot import Axes, Figure, describe_machine, plt  # first: it chooses matplotlib's backend
from npuzero.cli.output.palette import PAPER, PARTS, STYLE, add_caption, text_colour
from npuzero.parallel.pipeline_parallel.schedule import PipelineSchedule, ScheduleTimeline, simulate

#: Forward, backward; or backward of inputs and of weights.
COLOURS = {"F": PARTS["parameters"], "B": PARTS["gradients"], "I": PARTS["gradients"], "W": PARTS["activations"]}
NAMES = {"F": "forward", "B": "backward", "I": "backward of inputs", "W": "backward of weights"}
_HEIGHT = 0.8
_WIDE = 1 / 60  # of the drawn time: a narrower box has no room for its number


def plot_schedule(schedule: PipelineSchedule, ran: ScheduleTimeline, path: Path, facts: Mapping[str, Any]) -> None:
    """Draw ``schedule`` above its execution ``ran``, in seconds, into ``path``; ``facts``: see ``draw_timelines``."""
    with plt.rc_context(STYLE):
        figure = draw_timelines({"As planned": planned_timeline(schedule, ran), "As it ran": ran}, facts)
        figure.savefig(path, dpi=150)
        plt.close(figure)


def planned_timeline(schedule: PipelineSchedule, ran: ScheduleTimeline) -> ScheduleTimeline:
    """Return the timeline of ``ran`` if each action took the median of its kind, and nothing else took time."""
    lengths = {
        kind: median([float(timed.end - timed.begin) for timed in ran.acts if timed.act.kind == kind])
        for kind in {timed.act.kind for timed in ran.acts}
    }
    weights = lengths.get("W", 0.0)
    return simulate(schedule, lengths["F"], lengths["I"] + weights if "I" in lengths else lengths["B"], weights)


def draw_timelines(timelines: Mapping[str, ScheduleTimeline], facts: Mapping[str, Any]) -> Figure:
    """Draw a panel for each of ``timelines``, in seconds on one axis, with a row for each rank.

    Args:
        timelines: by title.
        facts: ``title`` and ``machine`` of the run, if known.
    """
    inches = [0.9 + 0.42 * len(timeline.rows) for timeline in timelines.values()]
    figure, panels = plt.subplots(
        len(timelines), 1, figsize=(12, 1.5 + sum(inches)), sharex=True, squeeze=False, layout="constrained",
        height_ratios=inches,
    )  # fmt: skip
    end = 1000 * max(float(timeline.makespan) for timeline in timelines.values())
    for (title, timeline), axes in zip(timelines.items(), panels[:, 0], strict=True):
        _draw_timeline(axes, timeline, end)
        span = f"{1000 * float(timeline.makespan):.4g} ms, bubble {float(timeline.bubble):.0%}"
        axes.set_title(f"{title}: {span}; alive at most {', '.join(map(str, timeline.peak))}")
    panels[-1, 0].set_xlabel("ms from the begin of the first act · numbers: stage and micro-batch")
    kinds = {timed.act.kind for timeline in timelines.values() for timed in timeline.acts}
    legend = [Patch(color=COLOURS[kind], label=NAMES[kind]) for kind in COLOURS if kind in kinds]
    finding = ", ".join(f"{title.lower()} {float(each.bubble):.0%}" for title, each in timelines.items())
    add_caption(
        figure, f"Ranks wait: {finding}", facts.get("title", ""), describe_machine(facts.get("machine")), legend
    )
    return figure


def _draw_timeline(axes: Axes, timeline: ScheduleTimeline, end: float) -> None:
    """Draw one timeline."""
    start = min(timed.begin for timed in timeline.acts)
    for rank, act, begin, until in timeline.acts:
        left, width = 1000 * float(begin - start), 1000 * float(until - begin)
        colour = COLOURS[act.kind]
        axes.broken_barh([(left, width)], (rank - _HEIGHT / 2, _HEIGHT), facecolor=colour, edgecolor=PAPER)
        if width > end * _WIDE:
            look = {"ha": "center", "va": "center_baseline", "color": text_colour(colour), "fontsize": 8}
            axes.text(left + width / 2, rank, f"{act.stage}.{act.micro}", **look)
    ranks = range(len(timeline.rows))
    axes.set_yticks(ranks, [f"rank {rank}" for rank in ranks])
    axes.set(xlim=(0, end * 1.005), ylim=(len(ranks) - 0.5, -0.5))
    axes.spines["left"].set_visible(False)
    axes.tick_params(axis="y", length=0)
