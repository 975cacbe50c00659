"""``npuzero plan``: options that round communication, and the share sent between nodes."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from dataclasses import replace

from npuzero.cli.output.table import format_bytes
from npuzero.plan import LOCAL, NODE, PRECISIONS, SUMS, MeshShape, Precision, Report
from npuzero.plan.table.precision import DTYPES, FEEDBACKS, GATHERS
from npuzero.plan.table.wire import THIN, Wire

_NAMES: dict[str, Wire] = {**DTYPES, **{name: name for name in THIN}}

LEGEND = """\
Between and inside nodes: what of this goes along the axes node and local; a collective over both goes level by level.
zero++ and thin are hpz with parameters gathered in 8 bits and gradients reduced in 4, along both axes or between nodes
alone (all_to_all): what they compute is rounded, docs/numerics.md says by how much."""


def add_wire_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of communication formats for parameters and gradients."""
    wires = parser.add_argument_group("what travels; all but --sums round it (docs/numerics.md)")
    wires.add_argument(
        "--sums",
        choices=SUMS,
        default="fp32",
        help="in which finished sums travel where ranks keep the same states (fp32)",
    )
    wires.add_argument(
        "--gathers", choices=[bits for bits in GATHERS if bits], help="parameters that are gathered to compute"
    )
    wires.add_argument(
        "--wires",
        type=parse_wires,
        metavar="WIRE",
        help=f"gradients: {', '.join(_NAMES)}, or by axis, such as node=int4,local=bf16 (as parameters)",
    )
    wires.add_argument(
        "--feedback", choices=[axes for axes in FEEDBACKS if axes], help="axes along which what rounding loses is kept"
    )


def parse_wires(text: str) -> Wire | dict[str, Wire]:
    """Parse the format of gradients: ``int4``, or by axis: ``node=int4,local=bf16``."""
    pairs = [part.strip().rpartition("=") for part in text.split(",")]
    found = {axis.strip(): _NAMES.get(name.strip()) for axis, _, name in pairs}
    known = {axis: wire for axis, wire in found.items() if wire is not None}
    if len(known) < len(pairs) or (len(pairs) > 1 and "" in known):
        raise argparse.ArgumentTypeError(
            f"expected one of {', '.join(_NAMES)}, or axes with one each, such as node=int4,local=bf16; got {text!r}"
        )
    return known.get("", known)


def build_precision(options: argparse.Namespace) -> Precision:
    """Return the precision of the options.

    Raises:
        ConfigError: they contradict each other.
    """
    return replace(
        PRECISIONS[options.precision],
        sums=options.sums,
        gathers=options.gathers,
        wires=options.wires,
        feedback=options.feedback,
    )


def describe_wire_options(options: argparse.Namespace) -> str:
    """Describe the options in a title, after the precision's name."""
    words = ", sums in the communication dtype" if options.sums == "wire" else ""
    words += f", parameters gathered in {options.gathers}" if options.gathers else ""
    if options.wires is not None:
        by_axis = options.wires if isinstance(options.wires, dict) else {"": options.wires}
        words += ", gradients in " + " and ".join(
            f"{_get_wire_name(wire)} along {axis}" if axis else _get_wire_name(wire) for axis, wire in by_axis.items()
        )
    where = "all axes" if options.feedback == "all" else options.feedback
    return words + (f", what rounding loses along {where} kept" if options.feedback else "")


def _get_wire_name(wire: Wire) -> str:
    return next(name for name, known in _NAMES.items() if known == wire)


def internode_columns(rows: Mapping[str, Report], mesh: MeshShape) -> dict[str, dict[str, str]]:
    """Return columns of the bytes that a rank sends between and inside nodes; none on a single node."""
    if mesh.node == 1:
        return {}
    axes = {"between nodes": NODE, "inside nodes": LOCAL}
    return {
        what: {name: format_bytes(sum(report.sent_along.get(axis, {}).values())) for name, report in rows.items()}
        for what, axis in axes.items()
    }
