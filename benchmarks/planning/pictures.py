"""The planner's pictures, one command each. From the repository's root, or installed:

    python -m benchmarks.planning.pictures step benchmarks/results/planned-cpu.json --out docs/planner-step.png
    python -m benchmarks.planning.pictures efficiency --out docs/planner-efficiency.png
    python -m benchmarks.planning.pictures scaling --out docs/planner-scaling.png
    python -m benchmarks.planning.pictures fits --out docs/planner-fits.png
    python -m benchmarks.planning.pictures skew --out docs/planner-skew.png

All but the first are computed without running anything. For memory by plan use `npuzero plan --on ... --plot`.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path

import numpy as np
from matplotlib.colors import LinearSegmentedColormap
from matplotlib.patches import Patch
from matplotlib.ticker import NullLocator

from benchmarks.contenders import describe_records
from benchmarks.planning.efficiency import (
    bandwidth_for,
    checkpoint_intensity,
    efficiency,
    parameter_intensity,
    state_intensity,
)
from benchmarks.planning.published import PublishedRun, PublishedTable
from benchmarks.planning.skew import LateRank, SlowLink, step_loss
from benchmarks.plot import Axes, Figure, plt  # first: it chooses matplotlib's backend
from npuzero.bench import Record, Result
from npuzero.cli.output.palette import (
    CURVES,
    FAINT,
    GOAL,
    MAP,
    MISFIT,
    OTHER,
    OWN,
    PAPER,
    PARTS,
    STYLE,
    TEXT,
    WORK,
    add_caption,
    text_colour,
)
from npuzero.config import Settings
from npuzero.plan import MeshShape, Plan, steady_step
from npuzero.planner import Cluster, TrainingJob, TrainingRun, from_size
from npuzero.planner.hardware.rates import elementwise_s, find_compute_dtype, products_s
from npuzero.planner.model_work.units import measure_workload
from npuzero.planner.timing.estimate import Estimator
from npuzero.shard.build import build_steady_step

ARITHMETIC = "Arithmetic of npuzero.planner; nothing was run."

# -- planned and measured steps
# -----------------------------------------------------------------------------------------

#: Compute time by kind, in stacking order.
SPENT = {
    "products": (PARTS["parameters"], "matrix products"),
    "element-wise": (PARTS["states"], "element-wise work"),
    "recomputation": (CURVES[-1][0], "forward again"),
    "update": (WORK["compute"], "update"),
    "contention": (PARTS["activations"], "beside traffic"),
    "wait": (WORK["waiting"], "waiting"),
}


def draw_planned_steps(record: Record) -> Figure:
    """Return the picture of planned steps, by kind of time, next to bars of the measured steps."""
    results = [result for result in record.results if result.values.keys() <= planned_seconds(result).keys()]
    figure, panels = plt.subplots(1, len(results), figsize=(11, 4.6), squeeze=False, layout="constrained")
    for axes, result in zip(panels[0], results, strict=True):
        _draw_step_panel(axes, result)
    panels[0, 0].set_ylabel("milliseconds of a step")
    # The legend lists only kinds of time that occur in some step.
    there = {part for r in results for v in r.values.values() for part, took in sum_waits(v["parts_s"]).items() if took}
    handles = [Patch(facecolor=colour, label=name) for part, (colour, name) in SPENT.items() if part in there]
    handles.append(Patch(facecolor=OTHER, label="measured, median and spread"))
    sizes = results[0].parameters
    subject = (
        f"A GPT of {sizes['layers']} blocks, {sizes['precision']}, 2 CPU ranks. Planned from what npuzero bench cluster"
        " measures in the same rounds."
    )
    add_caption(
        figure,
        summarize_planned_steps(results),
        subject,
        describe_records([record], {r.name for r in results}),
        handles,
    )
    return figure


def planned_seconds(result: Result) -> dict[str, float]:
    """Return the planner's seconds, by contender."""
    return {name: values["planned_s"] for name, values in result.values.items() if "planned_s" in values}


def summarize_planned_steps(results: Sequence[Result]) -> str:
    """Return the largest error of a planned step."""
    apart = [
        abs(planned / statistics.median(result.seconds[name]) - 1)
        for result in results
        for name, planned in planned_seconds(result).items()
    ]
    return f"A planned step is within {100 * max(apart):.0f} % of the measured one"


def sum_waits(parts: Mapping[str, float]) -> dict[str, float]:
    """Return seconds by :data:`SPENT`, with all waits summed."""
    found = dict.fromkeys(SPENT, 0.0)
    for part, seconds in parts.items():
        found["wait" if part.startswith("wait for") else part] += seconds
    return found


def _draw_step_panel(axes: Axes, result: Result) -> None:
    width, names = 0.38, list(planned_seconds(result))
    for place, name in enumerate(names):
        seconds, bottom = result.seconds[name], 0.0
        for part, took in sum_waits(result.values[name]["parts_s"]).items():
            axes.bar(place - width / 2, took * 1e3, width, bottom, color=SPENT[part][0], edgecolor=PAPER, lw=0.4)
            bottom += took * 1e3
        middle = statistics.median(seconds) * 1e3
        low, high = np.percentile(np.array(seconds) * 1e3, (25, 75))
        axes.bar(place + width / 2, middle, width, color=OTHER, edgecolor=PAPER, lw=0.4)
        axes.errorbar(place + width / 2, middle, [[middle - low], [high - middle]], color=TEXT, lw=1, capsize=3)
        axes.annotate(
            f"{bottom / middle - 1:+.0%}", (place - width / 2, bottom), (0, 3), textcoords="offset points", ha="center",
            fontsize=9,
        )  # fmt: skip
    axes.set_xticks(range(len(names)), [name.removeprefix("npuzero ") for name in names])
    axes.set_title(f"{result.parameters['batch']} sequence{'s' * (result.parameters['batch'] > 1)} a rank")
    axes.grid(axis="y")
    axes.tick_params(axis="x", length=0)


# -- efficiency against bandwidth --------------------------------------------------------------------------------------

PEAK, LENGTH = 70e12, 1024
BATCHES, WIDTHS = (1, 2, 4, 8, 16), (2048, 8192, 32768, 65536)


def draw_efficiency() -> Figure:
    """Return ZeRO-Infinity's figure 3: efficiency by the bandwidth of each kind of state."""
    panels: list[tuple[str, Sequence[float], dict[str, float]]] = [
        (
            "Parameters and gradients",
            (1, 1e3),
            {f"batch {batch}": parameter_intensity(LENGTH, batch) for batch in BATCHES},
        ),
        ("Optimizer states", (1, 1e4), {f"batch {batch}": state_intensity(LENGTH, batch) for batch in BATCHES}),
        (
            "Activation checkpoints",
            (0.1, 1e2),
            {f"width {width // 1024}K": checkpoint_intensity(width) for width in WIDTHS},
        ),
    ]
    figure, axes = plt.subplots(1, 3, figsize=(12, 4.4), sharey=True, layout="constrained")
    for panel, (title, (low, high), curves) in zip(axes, panels, strict=True):
        rates = np.geomspace(low, high, 200)
        for (name, intensity), (colour, dashes) in zip(curves.items(), CURVES, strict=False):
            values = [100 * efficiency(intensity, rate * 1e9, PEAK) for rate in rates]
            panel.plot(rates, values, color=colour, linestyle=dashes, linewidth=1.8, label=name)
        panel.axhline(90, color=FAINT, linewidth=0.8, linestyle=":")
        panel.set(title=title, xscale="log", xlabel="GB/s of a device, log scale", ylim=(0, 101))
        panel.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
        panel.grid(axis="both")
        panel.legend(fontsize=9, loc="upper left" if title == "Optimizer states" else "lower right")
    axes[0].set_ylabel("efficiency, % of 70 TFLOPS")
    states = bandwidth_for(0.9, state_intensity(LENGTH, 2), PEAK) / 1e12
    kept = bandwidth_for(0.9, checkpoint_intensity(WIDTHS[0]), PEAK) / 1e9
    finding = (
        f"For 90 % optimizer states want {states:.2f} TB/s at batch 2, activation checkpoints {kept:.0f} GB/s or less"
    )
    subject = (
        "A device that computes 70 TFLOPS where it waits for nothing; sequences of 1,024; batch: sequences of a device."
        " ZeRO-Infinity, section 4."
    )
    add_caption(figure, finding, subject, ARITHMETIC)
    return figure


# -- tokens per second from 8 to 1,024 devices
# ---------------------------------------------------------------------------

#: InternEvo's rows: prefix of their names, and display names.
SERIES = {
    "tp=1 zero1=8": "states over 8 devices",
    "tp=1 zero1=-1": "states over all: broadcasts, owner by owner",
    "tp=2 zero1=-1": "2 tensor ranks, states over all",
    "recompute": "recomputation, states over 8",
}


def table_series(table: PublishedTable, name: str) -> list[PublishedRun]:
    """Return the judged rows of one series, by number of devices."""
    rows = [row for row in table.judged if row.name.startswith(f"{name}, ") and row.name.count(",") == 1]
    return sorted(rows, key=lambda row: row.ranks)


def draw_scaling() -> Figure:
    """Return tokens per second and device by number of devices: lines as planned, dots as published."""
    table = PublishedTable.named("internevo")
    figure, axes = plt.subplots(figsize=(10, 5.2), layout="constrained")
    apart = []
    for (name, label), (colour, dashes) in zip(SERIES.items(), CURVES, strict=False):
        rows = table_series(table, name)
        ranks, planned = [row.ranks for row in rows], [table.predict(row) for row in rows]
        apart += [abs(value / row.published - 1) for value, row in zip(planned, rows, strict=True)]
        axes.plot(ranks, planned, color=colour, linestyle=dashes, linewidth=1.8, label=label)
        axes.plot(ranks, [row.published for row in rows], "o", color=colour, markersize=6, markeredgecolor=PAPER)
    ranks = [row.ranks for row in table_series(table, next(iter(SERIES)))]
    axes.set(xscale="log", xlabel="devices, log scale", ylabel="tokens a second and device", ylim=(2000, 4400))
    axes.set_xticks(ranks, [f"{n:,}" for n in ranks])
    axes.xaxis.set_minor_locator(NullLocator())
    axes.grid(axis="both")
    axes.legend(fontsize=10, loc="lower left")
    last = {name: table.predict(table_series(table, name)[-1]) for name in ("tp=1 zero1=-1", "tp=1 zero1=8")}
    lost = 1 - last["tp=1 zero1=-1"] / last["tp=1 zero1=8"]
    finding = f"Broadcasts from owner after owner cost {100 * lost:.0f} % of the speed at 1,024 devices"
    subject = (
        f"InternEvo's 7B model on A100s: lines as planned from shipped numbers, dots as published; "
        f"on average {100 * statistics.fmean(apart):.1f} % apart."
    )
    add_caption(figure, finding, subject, f"{ARITHMETIC} Published: {table.source.partition(';')[0]}.")
    return figure


# -- fitting batches ---------------------------------------------------------------------------------------------------

FIT_ON, FIT_SEQUENCE, FIT_SIZES = "8x910b-64g", 4096, (1, 2, 4, 8, 16)
FIT_ROWS = [
    (preset, recompute) for preset in ("zero0", "zero1", "zero2", "zero3", "offload") for recompute in (False, True)
]


def draw_fits() -> Figure:
    """Return a map of micro-batches by plan: memory, and speed where they fit."""
    job = TrainingJob(from_size(7 * 10**9), Cluster.named(FIT_ON), FIT_SEQUENCE)
    estimator, gib = Estimator(job), 2.0**30
    limit = job.cluster.device.memory_bytes
    # A rate stays NaN where the micro-batch does not fit; it is then drawn with the excess memory.
    held, rates = (np.full((len(FIT_ROWS), len(FIT_SIZES)), np.nan) for _ in range(2))
    for (i, (preset, recompute)), (j, size) in (
        (row, column) for row in enumerate(FIT_ROWS) for column in enumerate(FIT_SIZES)
    ):
        run = TrainingRun(
            Plan.preset(preset, precision="bf16"), MeshShape(1, job.cluster.local), size, recompute=recompute
        )
        estimate = estimator.estimate(run)
        held[i, j] = estimate.memory["device"]
        if held[i, j] <= limit:
            rates[i, j] = estimator.time(estimate).tokens_per_s
    figure, axes = plt.subplots(figsize=(10, 5.6), layout="constrained")
    map_ = LinearSegmentedColormap.from_list("rates", MAP)
    least, most = np.nanmin(rates), np.nanmax(rates)
    for i in range(len(FIT_ROWS)):
        for j in range(len(FIT_SIZES)):
            there = np.isfinite(rates[i, j])
            colour = _hex_colour(map_((rates[i, j] - least) / (most - least))) if there else MISFIT
            text = (
                f"{rates[i, j]:,.0f}\n{held[i, j] / gib:.0f} GiB"
                if there
                else f"{(held[i, j] - limit) / gib:,.0f} GiB too much"
            )
            axes.add_patch(plt.Rectangle((j - 0.5, i - 0.5), 1, 1, facecolor=colour, edgecolor=PAPER, lw=1.5))
            axes.text(j, i, text, ha="center", va="center", fontsize=9, color=text_colour(colour) if there else GOAL)
    labels = [f"{preset}{', recompute' * recompute}" for preset, recompute in FIT_ROWS]
    axes.set_yticks(range(len(labels)), labels)
    axes.set_xticks(range(len(FIT_SIZES)), [str(size) for size in FIT_SIZES])
    axes.set(xlim=(-0.5, len(FIT_SIZES) - 0.5), ylim=(len(labels) - 0.5, -0.5), xlabel="sequences of a micro-batch")
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)
    i, j = np.unravel_index(np.nanargmax(rates), rates.shape)
    best = f"{labels[i]} with {FIT_SIZES[j]} sequence{'s' * (FIT_SIZES[j] > 1)} a micro-batch"
    finding = f"Fastest of what fits: {best}, {most:,.0f} tokens/s a device"
    subject = (
        f"A 7B model of Llama's shapes, bf16, on {FIT_ON}, sequences of {FIT_SEQUENCE:,}; tokens/s of a device, and the"
        f" most that it holds of {limit / gib:.0f} GiB."
    )
    add_caption(figure, finding, subject, ARITHMETIC)
    return figure


def _hex_colour(colour: Sequence[float]) -> str:
    return "#" + "".join(f"{round(255 * part):02X}" for part in colour[:3])


# -- one slow link, one late rank --------------------------------------------------------------------------------------

SKEW_ON, SKEW_SEQUENCE, SKEW_FACTOR, SKEW_LATE = "64xa100-80g", 4096, 4.0, 0.1
SKEW_PRESETS = ("zero0", "zero1", "zero2", "zero3", "hpz", "hsdp", "thin")


def disturbance_losses() -> dict[str, tuple[float, ...]]:
    """Return the cost of each of :data:`DISTURBED` by plan, as a fraction of a step."""
    cluster, model, settings = Cluster.named(SKEW_ON), from_size(7 * 10**9), Settings()
    work = measure_workload(model, SKEW_SEQUENCE).units
    found = {}
    for preset in SKEW_PRESETS:
        plan = Plan.preset(preset, precision="bf16")
        mesh = plan.mesh_shape(MeshShape(cluster.nodes, cluster.local))
        flats, facts = build_steady_step(model.units, plan, mesh, settings, spans=model.spans, clip=True)
        moves = steady_step(flats, plan, mesh, facts)
        dtype = find_compute_dtype(plan)

        def compute_s(unit: int, backward: bool, dtype: str = dtype) -> float:
            own = work[unit]
            nbytes = own.backward_bytes if backward else own.forward_bytes
            flops = (2 if backward else 1) * own.flops
            device = cluster.device
            return products_s(device, flops, dtype, SKEW_SEQUENCE) + elementwise_s(device, nbytes, dtype)

        loss = partial(step_loss, cluster, mesh, moves, compute_s)
        step_s = loss(LateRank(0.0)).step_s
        found[preset] = tuple(loss(disturbed(step_s)).part for disturbed in DISTURBED.values())
    return found


#: By panel title: the disturbance, given the seconds of a step.
DISTURBED: dict[str, Callable[[float], SlowLink | LateRank]] = {
    f"A link between nodes {SKEW_FACTOR:g} × slower": lambda step_s: SlowLink(SKEW_FACTOR),
    f"A link in a node {SKEW_FACTOR:g} × slower": lambda step_s: SlowLink(SKEW_FACTOR, "local"),
    f"A rank late by {100 * SKEW_LATE:.0f} % of a step": lambda step_s: LateRank(SKEW_LATE * step_s),
}


def draw_skew() -> Figure:
    """Return the cost per step of one slow link, and of one late rank, under each plan."""
    found = disturbance_losses()
    figure, panels = plt.subplots(1, len(DISTURBED), figsize=(12, 4.2), sharey=True, layout="constrained")
    for at, (axes, title) in enumerate(zip(panels, DISTURBED, strict=True)):
        values = [100 * each[at] for each in found.values()]
        axes.barh(list(found), values, 0.66, color=PARTS["states"] if at == len(DISTURBED) - 1 else OWN)
        for place, value in enumerate(values):
            text = "nothing" if value < 0.05 else f"{value:.1f}"
            axes.annotate(text, (value, place), (4, 0), textcoords="offset points", va="center", fontsize=9)
        which = "that step" if at == len(DISTURBED) - 1 else "each step"
        axes.set(title=title, xlabel=f"{which} longer, %", xlim=(0, 1.2 * max(*values, 1)))
        axes.grid(axis="x")
        axes.tick_params(axis="y", length=0)
    panels[0].set_ylim(len(found) - 0.5, -0.5)
    slow = {name: 100 * each[0] for name, each in found.items()}
    most, least = max(slow, key=slow.__getitem__), min(slow, key=slow.__getitem__)
    finding = (
        f"A slow link costs {most} {slow[most]:.0f} %, {least} {slow[least]:.0f} %; a late rank costs all the same"
    )
    subject = f"A 7B model of Llama's shapes, bf16, on {SKEW_ON}, a sequence of {SKEW_SEQUENCE:,} a rank and step."
    add_caption(figure, finding, subject, ARITHMETIC)
    return figure


PICTURES: dict[str, Callable[[], Figure]] = {
    "efficiency": draw_efficiency,
    "scaling": draw_scaling,
    "fits": draw_fits,
    "skew": draw_skew,
}


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("picture", choices=["step", *PICTURES])
    parser.add_argument("record", type=Path, nargs="?", help="step: of benchmarks.planning.against_steps")
    parser.add_argument("--out", type=Path, required=True, metavar="FILE", help="for the picture")
    options = parser.parse_args(arguments)
    if (options.picture == "step") != (options.record is not None):
        parser.error("step takes a record, and no other picture does")
    with plt.rc_context(STYLE):
        figure = draw_planned_steps(Record.read(options.record)) if options.record else PICTURES[options.picture]()
        figure.savefig(options.out, dpi=150)
        plt.close(figure)


if __name__ == "__main__":
    main()
