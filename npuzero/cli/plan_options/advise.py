"""``npuzero plan --on``: does a model fit on a cluster, with which fastest plan, and how fast."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from npuzero.cli.arguments import parse_number
from npuzero.cli.output.plot import plot_reports
from npuzero.cli.output.table import format_bytes, format_table
from npuzero.cli.plan_options import wires
from npuzero.config import Settings
from npuzero.errors import ConfigError
from npuzero.plan import LOCAL, NODE, PIPE, PRESETS, SEQUENCE, TENSOR, Memory, Report
from npuzero.planner.advice import Advice, advise_on, check_sequence_length, plan_name
from npuzero.planner.hardware.cluster import Cluster
from npuzero.planner.model_work.job import TrainingJob
from npuzero.planner.model_work.units import ATTENTIONS
from npuzero.planner.models import ModelShape
from npuzero.planner.search import Choices, choices_over_axes
from npuzero.planner.timing.estimate import Estimate

#: Options of the table only: a search determines them itself, or does not support them.
_TABLE_ONLY = (
    "world", "local", "memory", "micro_batches", "between", "tiles", "pod", "schedule", "chunks", "states",
    "gradients", "lag", "link", "disk",
)  # fmt: skip
#: Options of a search only.
_SEARCH_ONLY = ("seq", "presets", "attention", "axes", "table", "trace")


def add_advice_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of a search."""
    answer = parser.add_argument_group("an answer: does it fit, how fast, which plan, what batch (docs/plan.md)")
    answer.add_argument("--on", metavar="CLUSTER", help="such as 8x910b-64g, or a cluster's JSON file")
    answer.add_argument("--seq", type=parse_number, metavar="N", help="tokens of a sequence")
    answer.add_argument("--presets", nargs="+", metavar="NAME", help=f"search among these ({', '.join(PRESETS)})")
    answer.add_argument("--attention", choices=ATTENTIONS, help="plain keeps scores (flash)")
    answer.add_argument("--axes", action="store_true", help="search along tensor, sequence and pipeline ranks, too")
    answer.add_argument("--table", action="store_true", help="the alternatives, too")
    answer.add_argument("--trace", type=Path, metavar="FILE", help="write a step of the best plan for Perfetto")


def check_advice_options(options: argparse.Namespace) -> None:
    """Check that the options fit the request: a search or a table.

    Raises:
        ConfigError: they do not.
    """
    others, needed = (_TABLE_ONLY, "no --on") if options.on else (_SEARCH_ONLY, "--on CLUSTER beside it")
    for name in others:
        if getattr(options, name) != options.parser.get_default(name):
            option = f"--{name.replace('_', '-')}"
            do = f"Leave {option} out, or ask without --on." if options.on else f"Say --on, or leave {option} out."
            given = "an answer, by --on" if options.on else "no --on"
            raise ConfigError(option, expected=needed, got=given, do=do)


def get_heads_divisor(options: argparse.Namespace) -> int:
    """Return a number that must divide the heads of a model given by its size."""
    ranks: int = options.tensor * options.sequence
    return max(ranks, Cluster.named(options.on).local) if options.axes else ranks


def _build_choices(cluster: Cluster, options: argparse.Namespace) -> Choices:
    """Return the search space."""
    choices = Choices(
        presets=tuple(options.presets or PRESETS),
        precisions=(wires.build_precision(options),),
        offloads=(options.offload,),
        mode=options.mode or "mtp",
        settings=Settings(prefetch=options.prefetch),
    )
    choices = choices_over_axes(cluster, choices) if options.axes else choices
    given = {axis: (size,) for axis in (TENSOR, SEQUENCE, PIPE) if (size := getattr(options, axis)) > 1}
    return replace(choices, **given)  # type: ignore[arg-type]


def _build_progress_printer(options: argparse.Namespace) -> Callable[[int, int], None] | None:
    """Return a progress printer for a search along all axes, which may take half a minute; None if not needed."""
    if not (options.axes and sys.stderr.isatty()):
        return None

    def tell(done: int, ways: int) -> None:
        end = "\n" if done + 1 == ways else ""
        print(f"\rlooked at {done + 1:,} of {ways:,} plans", end=end, file=sys.stderr, flush=True)

    return tell


def run_advice(model: ModelShape, options: argparse.Namespace) -> str:
    """Return the command's output."""
    cluster = Cluster.named(options.on)
    job = TrainingJob(model, cluster, check_sequence_length(options.seq), options.tokens, options.attention or "flash")
    choices = _build_choices(cluster, options)
    advice = advise_on(
        job, choices, every=(options.table or options.json) and not options.axes, tell=_build_progress_printer(options)
    )
    if options.trace:
        timeline = advice.best.timeline
        assert timeline is not None
        timeline.write_trace(options.trace)
    title = (
        f"{model.name}: {model.parameters:,} parameters, "
        f"{options.precision}{wires.describe_wire_options(options)}, on {format_cluster(cluster)}"
    )
    title += f", sequences of {job.sequence:,}"
    if options.plot:
        plot_reports(options.plot, title, advice_reports(advice), cluster.device.memory_bytes)
    if options.json:
        return json.dumps({"model": title, **advice_dict(advice)}, indent=2)
    legend = [_LEGEND] if options.table else []
    return "\n\n".join([str(advice), title, *([format_alternatives(advice)] if options.table else []), *legend])


_LEGEND = """\
batch: sequences of a micro-batch × micro-batches; device, host, nvme: the most that a rank holds, activations included;
sent: by a rank in a step, by axis, inner ones first; tokens/s: of a device; bound: what is busy longest."""


def advice_reports(advice: Advice) -> dict[str, Report]:
    """Return a report per plan, with activations: of its fastest run, or if none fits, of its smallest."""
    found: dict[str, Report] = {}
    for each in (*advice.found.fitting, *advice.found.slower, *advice.found.misfits):
        if plan_name(each) not in found:
            parts = dict(each.report.held[Memory.DEVICE])
            left = each.memory[Memory.DEVICE.value] - sum(parts.values())
            for part in ("buffers", "gradients"):  # below their own peaks at the peak of the step
                less = min(parts[part], max(0, -left))
                parts[part], left = parts[part] - less, left + less
            parts["activations"] = left
            found[plan_name(each)] = replace(each.report, held={**each.report.held, Memory.DEVICE: parts})
    return found


def format_cluster(cluster: Cluster) -> str:
    """Describe a cluster in words."""
    nodes = f" in {cluster.nodes} nodes" if cluster.nodes > 1 else ""
    return f"{cluster.ranks} × {cluster.name}{nodes}"


def format_alternatives(advice: Advice) -> str:
    """Return a table of plans: the fitting ones, fastest first, then the misfits."""
    rows = (*advice.found.fitting, *advice.found.misfits)
    memories = [m.value for m in Memory if m is Memory.DEVICE or any(each.memory.get(m.value) for each in rows)]
    nodes = advice.job.cluster.nodes > 1
    sent = ["between nodes", "inside nodes"] if nodes else ["sent"]
    header = ["plan", "batch", "recompute", *memories, *sent, "step", "tokens/s", "bound"]
    return format_table(header, [_alternative_row(each, memories, nodes, advice.choices.spare) for each in rows])


def _alternative_row(each: Estimate, memories: Sequence[str], nodes: bool, spare: float) -> list[str]:
    run = each.run
    levels = each.sent_by_level
    sent = [levels[NODE], levels[LOCAL]]
    if each.timeline is None:
        too_much = max(each.over(spare).values())
        timed = ["", "", f"{format_bytes(too_much)} too much"]
    else:
        timed = [f"{each.step_s:.3g} s", f"{each.tokens_per_s:,.0f}", each.bound]
    return [
        plan_name(each),
        f"{run.micro_batch} × {run.micro_batches}",
        "yes" if run.recompute else "no",
        *(format_bytes(each.memory.get(memory, 0)) for memory in memories),
        *(format_bytes(nbytes) for nbytes in (sent if nodes else [sum(sent)])),
        *timed,
    ]


def advice_dict(advice: Advice) -> dict[str, Any]:
    """Return the full advice, ready for JSON."""
    found, cluster = advice.found, advice.job.cluster
    return {
        "answer": advice.answer,
        "fits": advice.fits,
        "reasons": list(advice.reasons),
        "best": estimate_dict(found.fitting[0]) if advice.fits else None,
        "others": [estimate_dict(each) for each in found.fitting[1:]],
        "misfits": [estimate_dict(each) | {"bytes_over": each.over(advice.choices.spare)} for each in found.misfits],
        "ways_out": [{"what": way.what} | estimate_dict(way.estimate) for way in advice.ways_out],
        "spare": advice.choices.spare,
        "looked": found.looked,
        "timed": found.timed,
        "cluster": cluster.as_dict(),
    }


def estimate_dict(each: Estimate) -> dict[str, Any]:
    """Return an estimate, ready for JSON."""
    run, report, timeline = each.run, each.report, each.timeline
    named = {key: value for key, value in each.arguments().items() if isinstance(value, (str, int))}
    facts: dict[str, Any] = {
        "plan": run.plan.name,
        "arguments": named,
        "mesh": asdict(run.mesh),
        "axes": each.axes(),
        "micro_batch": run.micro_batch,
        "micro_batches": run.micro_batches,
        "recompute": run.recompute,
        "tokens_per_step": each.tokens,
        "memory": dict(each.memory),
        "bytes_held": report.bytes_held,
        "bytes_sent": report.bytes_sent,
        "bytes_sent_along": report.sent_along,
        "bytes_moved": report.bytes_moved,
        "layers_bytes_sent": each.layers_sent,
        "bytes_sent_by_level": each.sent_by_level,
    }
    if timeline is not None:
        facts |= {"step_s": each.step_s, "tokens_per_s": each.tokens_per_s, "bound": each.bound}
        facts |= {"parts_s": dict(timeline.parts), "busy_s": dict(timeline.busy)}
    return facts
