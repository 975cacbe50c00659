"""``npuzero check``: check that this installation computes correctly on this device. Writes one report to send back."""

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
from npuzero._native import npu_launches
from npuzero.bench import machine_fingerprint
from npuzero.bench.checks import check_ops as check
from npuzero.bench.checks.check_setup import check_setup, kernel_library
from npuzero.bench.checks.check_training import check_training
from npuzero.cli.arguments import parse_number
from npuzero.cli.disk import check_disks
from npuzero.cli.output.table import format_table
from npuzero.config import get_reportable_variables
from npuzero.errors import BenchmarkError
from npuzero.info import info

_EPILOG = """\
examples:
  npuzero check --device npu             some minutes; leaves runs/check/report.json
  npuzero check --device cpu --quick     seconds
  npuzero check --nvme /mnt/nvme0        what a disk can do for states that rest on it; half a minute

On an NPU: source CANN's set_env.sh and run `npuzero build-npu` first. Send the file back, whatever it says: it is
written as the checks go on, so it is there as well where one of them crashes or hangs. The status is 0 where everything
was right, 2 where something was not or could not be done."""

#: Parts of the report that consist of findings.
PARTS = ("setup", "ops", "collectives", "training")


def add_check_parser(commands: Any) -> None:
    """Add the command."""
    parser = commands.add_parser(
        "check",
        help="ops, collectives, training and bandwidths of a device against their references: a report to send back",
        description="Every op against its reference, collectives and training between ranks, and bandwidths.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--device", default="cpu", choices=list(devices.KINDS), help="the kind of device (cpu)")
    parser.add_argument(
        "--ranks", type=parse_number, default=2, metavar="N", help="processes that talk and train (2; 1: no talk)"
    )
    parser.add_argument("--quick", action="store_true", help="small sizes: that the command works")
    parser.add_argument("--out", type=Path, default=Path("runs/check"), metavar="FOLDER", help="(runs/check)")
    parser.add_argument(
        "--nvme", type=Path, action="append", default=[], metavar="FOLDER",
        help="measure this folder's disk instead, and what a step takes of it; again for each folder used at once",
    )  # fmt: skip
    parser.add_argument(
        "--parameters", type=parse_number, default=7 * 10**9, metavar="N", help="of the model that --nvme tells of (7B)"
    )
    parser.set_defaults(run=run_check)


def run_check(options: argparse.Namespace) -> str:
    """Run the command and return its output. The report is written in any case.

    Raises:
        BenchmarkError: a check failed.
    """
    if options.nvme:
        return check_disks(options.nvme, options.parameters, options.quick, _print_progress)
    report = CheckReport(options.out, f"--device {options.device} --ranks {options.ranks}{' --quick' * options.quick}")
    with report.part("setup", "installation"):
        report.facts["installation"] = info()
    with report.part("setup", f"device {options.device}"):
        device = _first_device(options.device)
        report.facts |= {"machine": machine_fingerprint(device), "device": devices.get(device).facts()}
        _check_everything(report, device, options)
    text = report.finish()
    wrong = [entry for part in PARTS for entry in report.facts[part] if entry["wrong"]]
    if wrong:
        _print_progress(text)
        available = devices.KINDS[options.device].available()
        raise BenchmarkError(
            f"npuzero check on {options.device}",
            expected="every case right",
            got=f"{sum(entry['wrong'] for entry in wrong)} wrong, first {wrong[0]['name']}: {wrong[0]['first'][0]}",
            do=f"Please send {report.path} back." if available.ok else available.do,
        )
    return f"{text}\n\nwritten to {report.path}"


def _check_everything(report: CheckReport, device: torch.device, options: argparse.Namespace) -> None:
    quick, ranks, kind = options.quick, options.ranks, options.device
    for finding in check_setup(device):
        report.add("setup", finding)
    with report.part("ops", "ops"):
        for finding in check.check_ops(device, quick):
            report.add("ops", finding)
    if ranks > 1:
        with report.part("collectives", f"{ranks} ranks"):
            findings, speeds = check.check_collectives(kind, ranks, quick)
            for finding in findings:
                report.add("collectives", finding)
            report.facts["bandwidths"] += [
                {"name": f"{verb}, {ranks} ranks", "gbs": gbs} for verb, gbs in speeds.items()
            ]
    with report.part("training", "training"):
        for finding, losses in check_training(kind, max(ranks, 1)):
            report.facts["losses"] |= losses
            report.add("training", finding)
    with report.part("ops", "bandwidths"):
        _check_bandwidths(report, device, quick)
    report.facts["kernels"]["blocks"] = npu_launches()  # last, to include the largest launches of all checks


def _check_bandwidths(report: CheckReport, device: torch.device, quick: bool) -> None:
    nominal = report.facts["device"].get("nominal_gbs")
    copied = None  # measured first; if it fails, the remaining bandwidths are still measured
    for name, measure in check.bandwidth_probes(device, quick):
        with report.part("ops", f"bandwidth of {name}"):
            gbs = measure()
            copied = gbs if name == check.COPY else copied
            entry = {"name": name, "gbs": gbs}
            if name not in check.LINKS:
                entry |= {"of_copy": _bandwidth_share(gbs, copied), "of_nominal": _bandwidth_share(gbs, nominal)}
            report.facts["bandwidths"].append(entry)


class CheckReport:
    """Write the report of one run into the folder `out`. It is rewritten at each finding, so that a crash leaves it."""

    def __init__(self, out: Path, arguments: str) -> None:
        self.path = out / "report.json"
        out.mkdir(parents=True, exist_ok=True)
        self.facts: dict[str, Any] = {
            "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
            "command": f"npuzero check {arguments}",
            "quick": "--quick" in arguments,
            "complete": False,
            "machine": machine_fingerprint(),
            "device": {},
            "variables": get_reportable_variables(),
            "kernels": kernel_library(),
            "installation": {},
            **{part: [] for part in PARTS},
            "losses": {},
            "bandwidths": [],
        }

    def add(self, part: str, finding: check.CheckFinding) -> None:
        """Print a finding, and write the report so far."""
        _print_progress(f"{finding.name}: {finding.cases - finding.wrong} of {finding.cases} right")
        self.facts[part].append(vars(finding))
        self._write()

    @contextmanager
    def part(self, part: str, name: str) -> Iterator[None]:
        """Turn an exception into a finding of `part` and continue the report."""
        try:
            yield
        except Exception as error:
            self.add(part, check.CheckFinding(name, 1, 1, [f"{type(error).__name__}: {error}"]))

    def finish(self) -> str:
        """Write the complete report and return it as text."""
        self.facts["complete"] = True
        self._write()
        return render_check(self.facts)

    def _write(self) -> None:
        text = json.dumps(self.facts, indent=1).replace(str(Path.home()), "~")
        self.path.write_text(text, encoding="utf-8")


def render_check(report: dict[str, Any]) -> str:
    """Return the report as text."""
    # A report may be incomplete: an exception in one part leaves the entries of that part empty.
    machine = report["machine"]
    parts = [
        f"npuzero check, {report['date']}{', quick: the bandwidths mean nothing' * report['quick']}",
        f"{machine['device']}; torch {machine['torch']}, npuzero {machine['npuzero']} {machine['commit'] or ''}",
        _format_facts(report["device"] | report["installation"].get("versions", {}) | report["variables"]),
        _format_facts(report["kernels"]),
    ]
    for title in PARTS:
        wrong = [entry for entry in report[title] if entry["wrong"]]
        parts.append(f"{title}: {len(report[title]) - len(wrong)} of {len(report[title])} checks right")
        if wrong:
            parts.append(
                format_table(
                    ["wrong", "cases", "wrong"], [[str(e[key]) for key in ("name", "cases", "wrong")] for e in wrong]
                )
            )
            parts.append("\n".join(f"{entry['name']}: {problem}" for entry in wrong for problem in entry["first"]))
    rows = [[name, *(f"{loss:.6g}" for loss in losses)] for name, losses in report["losses"].items()]
    if rows:
        parts.append(format_table(["losses of rank 0", *map(str, range(len(rows[0]) - 1))], rows))
    rows = [
        [entry["name"], f"{entry['gbs']:.1f}", *(_format_percent(entry.get(of)) for of in ("of_copy", "of_nominal"))]
        for entry in report["bandwidths"]
    ]
    if rows:
        parts.append(format_table(["bandwidth", "GB/s", "of the copy's", "of nominal"], rows))
    return "\n\n".join(part for part in parts if part)


def _bandwidth_share(gbs: float, whole: float | None) -> float | None:
    return gbs / whole if whole else None


def _format_percent(share: float | None) -> str:
    return "" if share is None else f"{100 * share:.0f} %"


def _format_facts(facts: dict[str, Any]) -> str:
    told = {name: value for name, value in facts.items() if value not in (None, {})}
    return "\n".join(f"{name:24} {value}" for name, value in told.items())


def _first_device(kind: str) -> torch.device:
    """Return the first device of the kind, and make it current."""
    if kind == "cpu":
        return devices.get(kind).device
    device = devices.get(f"{kind}:0").device
    getattr(torch, kind).set_device(device)
    return device


def _print_progress(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
