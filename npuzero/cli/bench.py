"""``npuzero bench``: how fast this machine runs the ops and the collectives, beside torch's ways in the same rounds."""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

import torch

from npuzero import device as devices
from npuzero.bench import Record, Result, comm, fingerprint, ops, summarize
from npuzero.cli.table import table
from npuzero.config import launch
from npuzero.errors import ConfigError

_EPILOG = """\
examples:
  npuzero bench                         both suites; some minutes
  npuzero bench ops --only pack norm
  npuzero bench comm --quick            that everything works, not how fast it is
  torchrun --nproc-per-node 8 -m npuzero bench comm --device cuda

Every time is a median over rounds in which all contenders took turns; "x" is how many times as fast as the first of
them, within a round, and "share" what that is of the bytes a second that the machine moved in the same round.
docs/benchmarks.md says more."""

# What the machine itself can do; contenders are shown as a share of the first of these in their benchmark.
PROBES = ("in place", "copy", "triad")


class Suite(Protocol):
    """Name what a module with benchmarks offers."""

    def names(self, quick: bool) -> list[str]: ...

    def results(self, wanted: Sequence[str], device: torch.device, quick: bool) -> Iterator[Result]: ...


_SUITES: dict[str, Suite] = {ops.SUITE: ops, comm.SUITE: comm}


def add_parser(commands: Any) -> None:
    """Add the command."""
    parser = commands.add_parser(
        "bench",
        help="time the ops and the collectives against torch's ways",
        description="Times the ops and the collectives against torch's ways to do the same, and writes JSON.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("suite", nargs="?", choices=list(_SUITES), help="one suite (default: both)")
    parser.add_argument("--quick", action="store_true", help="small sizes, few rounds: a smoke run")
    parser.add_argument("--device", default="cpu", help="cpu, cuda, npu, or one of several: cuda:1 (cpu)")
    parser.add_argument("--only", nargs="+", metavar="NAME", help="benchmarks whose names begin so (all)")
    parser.add_argument("--out", type=Path, default=Path("runs/bench"), metavar="FOLDER", help="for JSON (runs/bench)")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> str:
    """Return the command's output. Ranks of a launcher take part; the first one writes and tells."""
    device = devices.get(options.device).device
    leads = launch().rank == 0
    chosen = {name: _SUITES[name] for name in ([options.suite] if options.suite else _SUITES)}
    wanted = {name: _wanted(suite.names(options.quick), options.only) for name, suite in chosen.items()}
    if not any(wanted.values()):
        known = ", ".join(name for suite in chosen.values() for name in suite.names(options.quick))
        raise ConfigError(
            "--only", expected=f"beginnings of {known}", got=" ".join(options.only), do="Name one of these."
        )
    texts = []
    for name, names in wanted.items():
        if names:
            record = Record.begin(name, _command(name, options), fingerprint(device), quick=options.quick)
            for result in chosen[name].results(names, device, options.quick):
                record.results.append(result)
                if leads:
                    print(f"{result.name}: {_sentence(result)}", file=sys.stderr, flush=True)
            if leads:
                path = options.out / f"{name}.json"
                record.write(path)
                texts.append(f"{render(record)}\n\nwritten to {path}")
    return "\n\n".join(texts)


def render(record: Record) -> str:
    """Return the record as a table: a block of rows for each benchmark."""
    rows = []
    for result in record.results:
        rows.append([result.title, *[""] * 5])
        rows.extend([f"  {name}", *_cells(result, name)] for name in result.seconds)
    machine = record.machine
    where = f"{machine['device']}; torch {machine['torch']}, npuzero {machine['npuzero']} {machine['commit'] or ''}"
    title = f"{record.suite}, {record.date}{', quick: these figures mean nothing' * record.quick}\n{where}"
    return f"{title}\n\n{table(['', 'time', 'spread', 'GB/s', 'share', 'x'], rows)}"


def _cells(result: Result, name: str) -> list[str]:
    """Time, its spread, bytes per second, share of a probe's, times as fast as the baseline."""
    seconds, speed = summarize(result.seconds[name]), result.gb_per_s(name)
    probe = next((probe for probe in PROBES if probe in result.seconds), None)
    probing = name in PROBES
    return [
        duration(seconds.median),
        f"{seconds.mad / seconds.median:.1%}",
        f"{speed:.1f}" if speed else "",
        f"{result.share(name, probe).median:.2f} of {probe}" if probe and not probing else "",
        "" if probing else f"{result.speedup(name).median:.2f}",
    ]


def duration(seconds: float) -> str:
    """Format seconds with three digits, in the unit that suits."""
    for unit, size in (("s", 1.0), ("ms", 1e-3), ("µs", 1e-6)):
        if seconds >= size or unit == "µs":
            return f"{seconds / size:.3g} {unit}"
    raise AssertionError


def _sentence(result: Result) -> str:
    rounds = len(result.seconds[result.baseline])
    others = [name for name in result.seconds if name not in (result.baseline, *PROBES)]
    return ", ".join(f"{name} {result.speedup(name).median:.2f} x" for name in others) + f" ({rounds} rounds)"


def _wanted(names: Sequence[str], only: Sequence[str] | None) -> list[str]:
    return [name for name in names if only is None or name.startswith(tuple(only))]


def _command(suite: str, options: argparse.Namespace) -> str:
    """Return what repeats the suite."""
    words = ["npuzero", "bench", suite, *["--quick"] * options.quick, "--device", options.device]
    return shlex.join([*words, *(["--only", *options.only] if options.only else [])])
