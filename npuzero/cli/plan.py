"""``npuzero plan``: memory per rank and traffic per step of every preset, for a model given by size or by its JSON."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from npuzero.cli.arguments import number
from npuzero.cli.model import ModelShape, from_config, from_size
from npuzero.cli.plot import plot
from npuzero.cli.table import quantity, table, unit_for
from npuzero.config import Settings, read_json
from npuzero.errors import ConfigError
from npuzero.plan import PRECISIONS, PRESETS, Plan, Report

_EPILOG = """\
examples:
  npuzero plan --parameters 7e9 --units 32 --world 64 --local 8 --precision bf16
  npuzero plan --config config.json --world 16 --plot plan.png

Memory is of the training state and the engine's buffers; activations come on top. Traffic is what each rank sends
in one optimizer step. The model is trained by Adam or AdamW, all parameters trainable."""


def add_parser(commands: Any) -> None:
    """Adds the command."""
    defaults = Settings()
    parser = commands.add_parser(
        "plan",
        help="memory per rank and traffic per step of every preset",
        description="Memory per rank and traffic per step of every preset, by the table's arithmetic.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    model = parser.add_mutually_exclusive_group(required=True)
    model.add_argument("--parameters", type=number, metavar="N", help="size of the model, such as 7e9")
    model.add_argument("--config", type=Path, metavar="FILE", help="JSON of a dense transformer, Hugging Face's names")
    parser.add_argument("--units", type=number, metavar="N", help="blocks of the model (only with --parameters; 32)")
    parser.add_argument("--world", type=number, default=8, metavar="N", help="ranks in all (8)")
    parser.add_argument("--local", type=number, metavar="N", help="ranks that share a host (all)")
    parser.add_argument("--precision", choices=tuple(PRECISIONS), default="bf16", help="dtypes of the state (bf16)")
    parser.add_argument("--micro-batches", type=number, default=1, metavar="N", help="per step (1)")
    parser.add_argument(
        "--prefetch", type=int, default=defaults.prefetch, metavar="N", help=f"units ahead ({defaults.prefetch})"
    )
    parser.add_argument("--clip", action="store_true", help="the gradient norm is clipped")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw it as well (needs matplotlib)")
    parser.add_argument("--json", action="store_true", help="print bytes as JSON")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> str:
    """The command's output."""
    model = _model(options)
    reports = predictions(model, options)
    title = (
        f"{model.name}: {model.parameters:,} parameters, {options.precision}, {options.world} ranks"
        f" ({options.local or options.world} per host), {options.micro_batches} micro-batch"
        f"{'es' * (options.micro_batches > 1)} a step"
    )
    if options.plot:
        plot(options.plot, title, reports)
    if options.json:
        return json.dumps({"model": title, "parameters": model.parameters, "presets": as_dict(reports)}, indent=2)
    return render(title, reports)


def predictions(model: ModelShape, options: argparse.Namespace) -> dict[str, Report]:
    """A Report for each preset."""
    settings = Settings(prefetch=options.prefetch)
    reports = {}
    for preset in PRESETS:
        plan = Plan.preset(preset, precision=options.precision, local_size=options.local)
        reports[preset] = model.predict(
            plan, options.world, settings, micro_batches=options.micro_batches, clip=options.clip
        )
    return reports


def as_dict(reports: dict[str, Report]) -> dict[str, Any]:
    """The reports in bytes, by preset."""
    return {
        name: {"bytes_held": report.bytes_held, "bytes_sent": report.bytes_sent} for name, report in reports.items()
    }


def render(title: str, reports: dict[str, Report]) -> str:
    """Two tables: memory by part, traffic by verb; each with its total."""
    held = {name: report.bytes_held for name, report in reports.items()}
    sent = {name: report.bytes_sent for name, report in reports.items()}
    return "\n\n".join([title, _table("memory per rank", held), _table("sent per rank and step", sent)])


def _table(what: str, rows: dict[str, dict[str, int]]) -> str:
    columns = list(next(iter(rows.values())))
    unit, unit_bytes = unit_for(max(sum(values.values()) for values in rows.values()))
    body = [
        [name, *(quantity(nbytes, unit_bytes) for nbytes in (*values.values(), sum(values.values())))]
        for name, values in rows.items()
    ]
    return f"{what}, {unit}\n{table(['preset', *columns, 'total'], body)}"


def _model(options: argparse.Namespace) -> ModelShape:
    if options.parameters is not None:
        return from_size(options.parameters, 32 if options.units is None else options.units)
    if options.units is not None:
        raise ConfigError(
            "--units", expected="--parameters beside it", got="--config, which tells the blocks itself",
            do="Leave --units out.",
        )  # fmt: skip
    return from_config(read_json(options.config), str(options.config))
