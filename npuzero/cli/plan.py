"""``npuzero plan``: memory per rank and traffic per step of every preset, for a model by size or config.json."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from npuzero.cli.arguments import parse_memory_size, parse_named_number, parse_number
from npuzero.cli.output.plot import plot_reports
from npuzero.cli.output.table import format_bytes, format_table
from npuzero.cli.plan_options import advise, axes, pipes, tiers, wires
from npuzero.config import Settings, read_json
from npuzero.errors import ConfigError
from npuzero.plan import (
    AXES,
    ENDS,
    PRECISIONS,
    PRESETS,
    SEQUENCED,
    THINNED,
    VERBS,
    Memory,
    MeshShape,
    Placement,
    Plan,
    Report,
)
from npuzero.planner.models import KINDS, ModelShape, from_config, from_size
from npuzero.planner.search import make_equivalence_key

_EPILOG = """\
examples:
  npuzero plan config.json --on 8x910b-64g --seq 4096 --tokens 0.5M
  npuzero plan --parameters 7B --on 64xa100-80g --seq 2048 --tokens 4M --table
  npuzero plan --parameters 7B --world 64 --local 8 --memory 64GiB
  npuzero plan --config config.json --world 16 --precision bf16-8bit --plot plan.png
  npuzero plan --parameters 7B --world 64 --local 8 --gathers int8 --wires node=int4,local=bf16
  npuzero plan --parameters 70B --memory 64GiB --offload nvme --disk 5 --link 25
  npuzero plan --config config.json --world 64 --local 8 --tensor 2 --mode msp --tokens 4096
  npuzero plan --parameters 70B --world 64 --local 8 --pipe 4 --tensor 2 --micro-batches 16 --tokens 4096

With --on an answer comes first: whether it fits, the fastest plan and batch, how fast, and what bounds it; or what
would make it fit. Activations are counted then. --tokens are those of a step of all ranks together; without --on,
where there are the tables alone, of a rank and micro-batch.

FILE, or --config, counts to the element: by the model's class where transformers is installed (on meta: nothing is
downloaded, none of a repository's code is run), else by npuzero's own arithmetic for
{kinds}.

--parameters lays out a decoder of Llama's plan with just so many parameters: 128 times as wide as deep but 24 blocks
at least (12 below 250M), 32,000 words (below 2B: 50,000, tied); --units and --vocabulary say otherwise. Against real
models of that size traffic is then within 0.2 % and memory under zero0 within 2 %. Under zero3, where embeddings stay
gathered, an 8B model with 128,000 words needs half as much again, unless --vocabulary is given. Table: docs/plan.md.

presets, and what each shards over the ranks (docs/plan.md, "Presets"):
  zero0       nothing, as DDP                     zero3       parameters too
  zero1       states                              zero3-keep  the same, unsharded from forward to backward
  zero1.5     states, within a host               hpz         the same, sharded within a host meanwhile
  zero2       gradients and states                hsdp, mics  all, within a host
  zero++, thin (over several hosts): as hpz, parameters gathered in 8 bits; gradients in 4, thin: between hosts alone
  isp (with --sequence): parameters and gradients within a host, states over all

offload is zero2+host, offload3 zero3+host, infinity-states zero3+nvme, infinity zero3+nvme+parameters: --offload host,
--offload nvme ...; and delayed is offload with --lag 1.

Memory is of the training state and the engine's buffers; activations come on top. Traffic is what each rank sends
in one optimizer step. The model is trained by Adam or AdamW; what its class freezes stays frozen."""

#: Ranks by default.
_WORLD = 8

_LEGEND = """\
parameters, gradients, states (masters and Adam's moments): what stays on a rank; after_forward: parameters between a
block's forward and backward; between: between micro-batches; buffers: the most that gathered blocks and communication
buffers take at once.
Activations come on top.
Sent: all_gather, reduce_scatter and all_reduce carry parameters and gradients; control is the engine's own."""

_FAR_LEGEND = """\
Parts and total are on the device; host and nvme: all that rests there, and on the host a ring for what passes by.
link and disk: seconds that they are busy in a step; the update hides behind the next forward where that is longer."""


def add_plan_parser(commands: Any) -> None:
    """Add the command."""
    defaults = Settings()
    parser = commands.add_parser(
        "plan",
        help="will it fit, how fast, which plan; memory per rank and traffic per step of every preset",
        description="Whether a model fits, which plan is the fastest and how fast; or, without --on, memory per rank "
        "and traffic per step of every preset, by the table's arithmetic.",
        epilog=_EPILOG.format(kinds=", ".join(KINDS)),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    model = parser.add_mutually_exclusive_group(required=True)
    model.add_argument("--parameters", type=parse_number, metavar="N", help="size of the model, such as 7B or 350M")
    model.add_argument("file", nargs="?", type=Path, metavar="FILE", help="as --config")
    model.add_argument("--config", type=Path, metavar="FILE", help="config.json of a transformers model")
    parser.add_argument("--units", type=parse_number, metavar="N", help="blocks, with --parameters (by its size)")
    parser.add_argument("--vocabulary", type=parse_number, metavar="N", help="its entries, with --parameters (32,000)")
    parser.add_argument("--world", type=parse_number, metavar="N", help="ranks in all (8)")
    parser.add_argument("--local", type=parse_number, metavar="N", help="ranks that share a host (all)")
    parser.add_argument("--precision", choices=tuple(PRECISIONS), default="bf16", help="dtypes of the state (bf16)")
    parser.add_argument(
        "--memory", type=parse_memory_size, metavar="SIZE", help="of a rank, such as 64GiB: which presets fit"
    )
    parser.add_argument("--micro-batches", type=parse_number, default=1, metavar="N", help="per step (1)")
    parser.add_argument(
        "--between", choices=("unsharded",), help="parameters stay so between micro-batches, until the update"
    )
    parser.add_argument(
        "--prefetch", type=int, default=defaults.prefetch, metavar="N", help=f"units ahead ({defaults.prefetch})"
    )
    advise.add_advice_options(parser)
    wires.add_wire_options(parser)
    tiers.add_tier_options(parser)
    axes.add_axis_options(parser)
    parser.add_argument(
        "--tiles",
        type=parse_named_number,
        nargs="+",
        default=[],
        metavar="NAME=N",
        help="Linear layers in so many tiles, such as lm_head=8",
    )
    parser.add_argument("--clip", action="store_true", help="the gradient norm is clipped")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw it as well (needs matplotlib)")
    parser.add_argument("--json", action="store_true", help="print bytes as JSON")
    parser.set_defaults(run=run_plan, parser=parser)


def run_plan(options: argparse.Namespace) -> str:
    """Return the command's output."""
    options.config = options.config or options.file
    advise.check_advice_options(options)
    if options.on:
        return advise.run_advice(_load_model_shape(options, advise.get_heads_divisor(options)), options)
    options.world = options.world or _WORLD
    axes.check_axis_options(options)
    mesh = axes.build_mesh_shape(options)
    model = _load_model_shape(options, options.tensor * options.sequence).tiled(dict(options.tiles))
    model, layers = axes.divide_layers(model, mesh, options)
    pipe = pipes.build_pipeline_model(model, options)
    reports = predict_presets(pipe or model, mesh, options)
    title = _format_title(model, options)
    if options.plot:
        plot_reports(options.plot, title, reports, options.memory)
    if options.json:
        facts = {"model": title, "parameters": model.parameters, "presets": preset_reports_dict(reports, options)}
        if axes.has_parallel_axes(options):
            facts |= {"mesh": asdict(mesh), "layers_bytes_sent": layers}
        if pipe is not None:
            facts |= {"pipeline": pipe.as_dict()}
        if options.memory:
            facts |= {"memory_bytes": options.memory, "first_fit": first_fitting_preset(reports, options.memory)}
        return json.dumps(facts, indent=2)
    return render_plan(title, reports, mesh, layers, options, pipe)


def predict_presets(
    model: ModelShape | pipes.PipelineModel, mesh: MeshShape, options: argparse.Namespace
) -> dict[str, Report]:
    """Return a Report for each preset; and, if requested, for each preset with offloaded parts."""
    settings = Settings(prefetch=options.prefetch)
    precision = wires.build_precision(options)
    presets = (*PRESETS, *THINNED * (mesh.node > 1), *SEQUENCED * (mesh.sequence > 1))
    plans = [Plan.preset(preset, precision=precision) for preset in presets]
    plans = [replace(plan, between=Placement()) for plan in plans] if options.between else plans
    placed = [tiers.offload_plan(plan, options) for plan in plans if plan.name not in THINNED]
    facts = {"clip": options.clip}
    if isinstance(model, ModelShape):  # a pipeline takes them from its schedule
        facts["micro_batches"] = options.micro_batches
    return {plan.name: model.predict(plan, mesh, settings, **facts) for plan in (*plans, *placed) if plan is not None}


def preset_reports_dict(reports: dict[str, Report], options: argparse.Namespace) -> dict[str, Any]:
    """Return the reports in bytes, by preset. ``bytes_left`` is negative if a preset does not fit a rank's memory."""
    return {name: _report_dict(report, options) for name, report in reports.items()}


def _report_dict(report: Report, options: argparse.Namespace) -> dict[str, Any]:
    facts: dict[str, Any] = {"bytes_held": report.bytes_held, "bytes_sent": report.bytes_sent}
    facts |= {"bytes_sent_along": report.sent_along}
    if any(report.bytes_moved.values()):
        facts |= {"memory": report.memory, "bytes_moved": report.bytes_moved}
        facts |= {f"{what}_seconds": taken for what, taken in tiers.transfer_seconds(report, options).items()}
    return facts | ({"bytes_left": options.memory - _device_bytes(report)} if options.memory else {})


def first_fitting_preset(reports: dict[str, Report], memory_bytes: int) -> str | None:
    """Return the first preset, in table order, that fits in a rank's memory; None if none does."""
    return next((name for name, report in reports.items() if _device_bytes(report) <= memory_bytes), None)


def merge_equal_presets(reports: dict[str, Report], mesh: MeshShape) -> dict[str, Report]:
    """Merge presets that place the state in the same way on these ranks: one report, under all their names.

    On one host ``zero3 = hpz = hsdp = mics``; on one rank every preset is ``any preset``.
    """
    names: dict[object, list[str]] = {}
    for name, report in reports.items():
        names.setdefault(make_equivalence_key(report.plan, mesh), []).append(name)
    if len(names) == 1:
        return {"any preset": next(iter(reports.values()))}
    return {" = ".join(equal): reports[equal[0]] for equal in names.values()}


def render_plan(
    title: str,
    reports: dict[str, Report],
    mesh: MeshShape,
    layers: dict[str, dict[str, int]],
    options: argparse.Namespace,
    pipe: pipes.PipelineModel | None = None,
) -> str:
    """Render tables of memory by part and traffic by collective, with totals.

    A rank's memory adds a column of fits; a mesh with more axes adds traffic by axis and of layers; offloaded parts add
    the bytes moved between memories.
    """
    # Tables have a row per distinct plan, under joined names; the advice below them searches all presets.
    rows = merge_equal_presets(reports, mesh)
    memory_bytes: int | None = options.memory
    held = {name: dict(report.held[Memory.DEVICE]) for name, report in rows.items()}
    verbs = list(dict.fromkeys(verb for report in rows.values() for verb in report.bytes_sent if verb != VERBS[-1]))
    sent = {name: {v: report.bytes_sent.get(v, 0) for v in (*verbs, VERBS[-1])} for name, report in rows.items()}
    cuts = {"sharded": {name: _format_shard_counts(report.plan, mesh) for name, report in rows.items()}}
    fits = tiers.offloaded_columns(rows)
    if pipe is not None:
        fits["fullest rank"] = {name: pipe.fullest(report.plan.name) for name, report in rows.items()}
    if memory_bytes:
        fits[f"in {format_bytes(memory_bytes)}"] = {
            name: _format_fit(memory_bytes - _device_bytes(r)) for name, r in rows.items()
        }
    tables = [
        _bytes_table("memory per rank", held, cuts, fits),
        _bytes_table("sent per rank and step", sent, after=wires.internode_columns(rows, mesh)),
    ]
    if axes.has_parallel_axes(options):
        tables += [_traffic_by_axis(rows), *_layer_traffic(layers, options)]
    advice = [_format_fit_advice(reports, memory_bytes)] if memory_bytes else []
    legend = [_LEGEND, *[wires.LEGEND] * (mesh.node > 1)]
    if moved := tiers.bytes_moved_by_link(rows):
        busy = {name: tiers.transfer_seconds(rows[name], options) for name in moved}
        took = {what: {name: f"{busy[name][what]:.3g} s" for name in moved} for what in next(iter(busy.values()))}
        tables.append(_bytes_table("moved between memories per rank and step", moved, after=took))
        legend.append(_FAR_LEGEND)
    told = [] if pipe is None else [pipe.told()]
    return "\n\n".join([title, *told, *_explain_equal_presets(reports, mesh), *tables, *advice, *legend])


_Texts = Mapping[str, Mapping[str, str]]


def _bytes_table(
    what: str,
    rows: dict[str, dict[str, int]],
    before: _Texts | None = None,
    after: _Texts | None = None,
    first: str = "preset",
) -> str:
    """Return a table of bytes by preset and column, between further columns of text."""
    before, after = before or {}, after or {}
    columns = list(dict.fromkeys(column for values in rows.values() for column in values))
    body = [
        [
            name,
            *(texts[name] for texts in before.values()),
            *(format_bytes(nbytes) for nbytes in (*(values.get(c, 0) for c in columns), sum(values.values()))),
            *(texts[name] for texts in after.values()),
        ]
        for name, values in rows.items()
    ]
    return f"{what}\n{format_table([first, *before, *columns, 'total', *after], body)}"


def _traffic_by_axis(rows: dict[str, Report]) -> str:
    """Return a table of bytes by preset, axis and collective."""
    order = [(name, axis) for name in rows for axis in (ENDS, *AXES) if axis in rows[name].sent_along]
    sent = {(name, axis): rows[name].sent_along[axis] for name, axis in order}
    verbs = list(dict.fromkeys(verb for values in sent.values() for verb in values))
    body, last = [], ""
    for (name, along), values in sent.items():
        body.append([name if name != last else "", along, *(format_bytes(values.get(verb, 0)) for verb in verbs)])
        last = name
    return f"of this along each of the axes\n{format_table(['preset', 'axis', *verbs], body)}"


def _layer_traffic(layers: dict[str, dict[str, int]], options: argparse.Namespace) -> list[str]:
    """Return the table of the layers' traffic, or why there is none."""
    if layers:
        whose = "per rank and" if options.pipe == 1 else "of all stages together per"
        return [_bytes_table(f"sent by the layers {whose} step, on top of any preset", layers, first="axis")]
    if options.tokens or options.pipe == options.tensor == options.sequence == 1:
        return []
    what = "layers" if options.pipe == 1 else "layers and stages"
    return [f"What {what} send on top depends on the batch: --tokens, of a rank and micro-batch, says how much it is."]


def _format_shard_counts(plan: Plan, mesh: MeshShape) -> str:
    """Describe the number of shards of each part of the state; parts with equal counts are grouped."""
    within = _within_step_placements(plan)
    # Placements within a step are listed only where they differ from the parameters at rest.
    resting = {part: placement for part, placement in plan.parts.items() if part not in within}
    shards = {part: mesh.size(placement.axes) for part, placement in resting.items()}
    cut: dict[int, list[str]] = {}
    for part, count in shards.items():
        if count > 1:
            cut.setdefault(count, []).append(part)
    if not cut:
        return "nothing"
    text = ", ".join(
        f"{'all' if len(alike) == len(shards) else ', '.join(alike)} / {count}" for count, alike in cut.items()
    )
    for part, count in ((part, mesh.size(placement.axes)) for part, placement in within.items()):
        if count != shards["parameters"]:
            text += f", {part} {'unsharded' if count == 1 else f'/ {count}'}"
    return text


def _within_step_placements(plan: Plan) -> dict[str, Placement]:
    """Return the placements of parameters within a step, by name."""
    return {"after_forward": plan.held_after_forward, "between": plan.held_between}


def _device_bytes(report: Report) -> int:
    return report.memory[Memory.DEVICE.value]


def _format_fit(bytes_left: int) -> str:
    return f"fits, {format_bytes(bytes_left)} left" if bytes_left >= 0 else f"{format_bytes(-bytes_left)} too much"


def _explain_equal_presets(reports: dict[str, Report], mesh: MeshShape) -> list[str]:
    """Explain why presets are equal, if the number of ranks or hosts is the reason."""
    ranks, group = mesh.node * mesh.local, "stage" if mesh.pipe > 1 else "pod"
    if ranks == 1:
        here = "" if len(reports) == len(PRESETS) else " but for what rests off the device"
        where = "On one rank" if mesh.world == 1 else f"With one rank in a {group} that has data of its own"
        return [f"{where} there is nothing to shard over: all presets are the same{here}."]
    if mesh.node == 1:
        whose = "" if mesh.world == ranks else f" with data of their own in a {group}"
        return [
            f"All {ranks} ranks{whose} share a host (--local says otherwise), so sharded within a host is sharded over"
            " all ranks:\nnames joined by = are the same plan here."
        ]
    return []


def _format_fit_advice(reports: dict[str, Report], memory_bytes: int) -> str:
    size = format_bytes(memory_bytes)
    first = first_fitting_preset(reports, memory_bytes)
    if first is not None:
        left = format_bytes(memory_bytes - _device_bytes(reports[first]))
        return f"The first that fits in {size} is {first}; {left} are left for activations."
    least = min(reports, key=lambda name: _device_bytes(reports[name]))
    over = format_bytes(_device_bytes(reports[least]) - memory_bytes)
    nearest = f"None fits in {size}; {least} is nearest" if reports[least].world > 1 else f"It does not fit in {size}"
    remedies = "take more ranks (--world), fewer bits (--precision) or another memory (--offload)"
    return f"{nearest}, {over} too much: {remedies}."


def _format_title(model: ModelShape, options: argparse.Namespace) -> str:
    frozen = f" ({model.frozen:,} frozen)" if model.frozen else ""
    ranks = f"{options.world} rank{'s' * (options.world > 1)} ({options.local or options.world} per host)"
    batches = f"{options.micro_batches} micro-batch{'es' * (options.micro_batches > 1)} a step"
    kept = ", parameters unsharded between them" if options.between else ""
    sizes = {"pipe": "", "tensor": f" ({options.mode or 'mtp'})", "sequence": "", "pod": ""}
    more = "".join(f", {axis} {size}{how}" for axis, how in sizes.items() if (size := getattr(options, axis)) > 1)
    told = f"{options.precision}{wires.describe_wire_options(options)}, {ranks}{more}, {batches}{kept}"
    return f"{model.name}: {model.parameters:,} parameters{frozen}, {told}"


def _load_model_shape(options: argparse.Namespace, ranks: int) -> ModelShape:
    """Return the model. A model given by its size has a number of heads that ``ranks`` divide."""
    if options.parameters is not None:
        return from_size(options.parameters, options.units, options.vocabulary, ranks)
    for name in ("units", "vocabulary"):
        if getattr(options, name) is not None:
            raise ConfigError(
                f"--{name}",
                expected="--parameters beside it",
                got="a file, which tells it itself",
                do=f"Leave --{name} out.",
            )
    return from_config(read_json(options.config), str(options.config))
