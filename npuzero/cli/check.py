"""``npuzero check``: does this installation compute what it should on this device? One report to send back."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch

from npuzero import device as devices
from npuzero.bench import check, fingerprint
from npuzero.cli.table import table
from npuzero.errors import BenchmarkError, NpuZeroError
from npuzero.info import info

_EPILOG = """\
examples:
  npuzero check --device npu             some minutes; leaves runs/check/report.json and report.txt
  npuzero check --device cpu --quick     seconds

On an NPU: source CANN's set_env.sh and run `npuzero build-npu` first. Send both files back, whatever they say. The
status is 0 where everything was right, 2 where something was not or could not be done."""


def add_parser(commands: Any) -> None:
    """Adds the command."""
    parser = commands.add_parser(
        "check",
        help="ops, collectives and bandwidths of a device against their references: a report to send back",
        description="Runs every op on a grid against its reference, collectives between ranks, and bandwidths.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--device", default="cpu", choices=list(devices.KINDS), help="the kind of device (cpu)")
    parser.add_argument("--ranks", type=int, default=2, metavar="N", help="processes for the collectives (2; 0: none)")
    parser.add_argument("--quick", action="store_true", help="small sizes: that the command works")
    parser.add_argument("--out", type=Path, default=Path("runs/check"), metavar="FOLDER", help="(runs/check)")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> str:
    """The command's output; the report is written in any case.

    Raises:
        BenchmarkError: something was wrong.
    """
    device = _device(options.device)
    report: dict[str, Any] = {
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "command": f"npuzero check --device {options.device} --ranks {options.ranks}{' --quick' * options.quick}",
        "quick": options.quick,
        "machine": fingerprint(device),
        "installation": info(),
        "ops": [],
        "collectives": [],
        "bandwidths": {},
    }
    for finding in check.check_ops(device, options.quick):
        _say(f"{finding.name}: {finding.cases - finding.wrong} of {finding.cases} right")
        report["ops"].append(vars(finding))
    if options.ranks > 1:
        with _told(report["collectives"], f"{options.ranks} ranks"):
            findings, speeds = check.check_collectives(options.device, options.ranks, options.quick)
            report["collectives"] = [vars(finding) for finding in findings]
            report["bandwidths"] |= {f"{verb}, {options.ranks} ranks": speed for verb, speed in speeds.items()}
    with _told(report["ops"], "bandwidths"):
        report["bandwidths"] |= check.bandwidths(device, options.quick)
    text = render(report)
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "report.json").write_text(json.dumps(report, indent=1), encoding="utf-8")
    (options.out / "report.txt").write_text(text + "\n", encoding="utf-8")
    wrong = [entry for part in ("ops", "collectives") for entry in report[part] if entry["wrong"]]
    if wrong:
        _say(text)
        raise BenchmarkError(
            f"npuzero check on {device}",
            expected="every case right",
            got=f"{sum(entry['wrong'] for entry in wrong)} wrong, first {wrong[0]['name']}: {wrong[0]['first'][0]}",
            do=f"Please send {options.out}/report.json and report.txt back.",
        )
    return f"{text}\n\nwritten to {options.out}/report.json and report.txt"


@contextmanager
def _told(findings: list[dict[str, Any]], name: str) -> Iterator[None]:
    """What cannot be done at all is a finding, and the report goes on."""
    try:
        yield
    except (NpuZeroError, RuntimeError) as error:
        findings.append(vars(check.Finding(name, 1, 1, [f"{type(error).__name__}: {error}"])))


def render(report: dict[str, Any]) -> str:
    """The report as text."""
    machine = report["machine"]
    parts = [
        f"npuzero check, {report['date']}{', quick: the bandwidths mean nothing' * report['quick']}",
        f"{machine['device']}; torch {machine['torch']}, npuzero {machine['npuzero']} {machine['commit'] or ''}",
    ]
    for title in ("ops", "collectives"):
        entries = report[title]
        rows = [[entry["name"], str(entry["cases"]), str(entry["wrong"] or "-")] for entry in entries]
        told = [f"{entry['name']}: {problem}" for entry in entries for problem in entry["first"]]
        if rows:
            parts.append("\n".join([table([title, "cases", "wrong"], rows), *told]))
    rows = [[name, f"{speed:.1f}"] for name, speed in report["bandwidths"].items()]
    parts.append(table(["bandwidth", "GB/s"], rows))
    return "\n\n".join(parts)


def _device(kind: str) -> torch.device:
    """The first device of the kind, made current."""
    if kind == "cpu":
        return devices.get(kind).device
    device = devices.get(f"{kind}:0").device
    getattr(torch, kind).set_device(device)
    return device


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
