"""``npuzero info``: show the contents of this installation, and why something is missing."""

from __future__ import annotations

import argparse
import json
from typing import Any

from npuzero.cli.output.table import format_table
from npuzero.info import info


def add_info_parser(commands: Any) -> None:
    """Add the command."""
    parser = commands.add_parser("info", help="devices, kernels, backends, versions, and why something is missing")
    parser.add_argument("--json", action="store_true", help="print the facts as JSON")
    parser.set_defaults(run=run_info)


def run_info(options: argparse.Namespace) -> str:
    """Return the command's output."""
    facts = info()
    return json.dumps(facts, indent=2) if options.json else render_info(facts)


def render_info(facts: dict[str, Any]) -> str:
    """Return the facts as a page of text."""
    devices, isa = facts["devices"], facts["isa"]
    # Kernels and collectives are listed for every kind of device, also for kinds that are not available here.
    named = {
        "Versions": {**facts["versions"], "platform": facts["platform"]},
        "Devices": {name: text for found in devices.values() for name, text in found["devices"].items()},
        "Collectives": {kind: ", ".join(found["backends"]) for kind, found in facts["collectives"].items()},
    }
    sections = {title: [f"{name:14} {text or 'none'}" for name, text in rows.items()] for title, rows in named.items()}
    kernels = [[op, *("yes" if has[kind] else "no" for kind in devices)] for op, has in facts["kernels"].items()]
    sections["Kernels in this build"] = [
        *format_table(["op", *devices], kernels).splitlines(),
        "",
        f"run by: {facts['backend']}; instruction set of the cpu kernels: {isa['chosen']}",
        f"(this machine has {', '.join(isa['supported'])}; built are {', '.join(isa['built'])})",
        f"their threads: {', '.join(facts['openmp']) or 'unknown'}",
        *([f"npu kernels: {facts['npu_kernels']}"] if facts["npu_kernels"] else []),
    ]
    sections["Missing"] = [f"{item['what']}: {item['why']}. {item['do']}" for item in facts["missing"]] or ["nothing"]
    return "\n\n".join(_format_section(title, lines) for title, lines in sections.items())


def _format_section(title: str, lines: list[str]) -> str:
    return "\n".join([title, *(f"  {line}".rstrip() for line in lines)])
