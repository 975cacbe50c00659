"""``npuzero bench``: time the ops and collectives against torch's in interleaved rounds; measure a cluster for the
planner.
"""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from npuzero import device as devices
from npuzero.bench import Record, Result, machine_fingerprint, summarize
from npuzero.bench.suites import cluster, comm, ops
from npuzero.cli.output.table import format_table
from npuzero.config import read_launch
from npuzero.errors import ConfigError
from npuzero.planner import Cluster

_EPILOG = """\
examples:
  npuzero bench                         both suites; some minutes
  npuzero bench ops --only pack norm
  npuzero bench comm --quick            that everything works, not how fast it is
  torchrun --nproc-per-node 8 -m npuzero bench comm --device cuda
  npuzero bench cluster --out cluster.json --nvme /mnt/nvme     then: npuzero plan ... --on cluster.json

Every time is a median over rounds in which all contenders took turns; "x" is how many times as fast as the first of
them, within a round, and "share" what that is of the bytes a second that the machine moved in the same round.
docs/benchmarks.md says more."""

# Probes of the machine; a contender's share is relative to the first of these in its benchmark.
PROBES = ("in place", "copy", "triad")


class BenchmarkSuite(NamedTuple):
    """Hold a suite's functions: its benchmark names, and the measurement of selected ones."""

    names: Callable[[bool], list[str]]
    results: Callable[[Sequence[str], torch.device, bool], Iterator[Result]]


_SUITES = {
    ops.SUITE: BenchmarkSuite(ops.ops_benchmark_names, ops.measure_ops),
    comm.SUITE: BenchmarkSuite(comm.comm_benchmark_names, comm.measure_comm),
}


def add_bench_parser(commands: Any) -> None:
    """Add the command."""
    parser = commands.add_parser(
        "bench",
        help="time the ops and the collectives against torch's ways",
        description="Times the ops and the collectives against torch's ways to do the same, and writes JSON.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    words = "one suite (default: ops and comm), or what the planner needs of this machine: cluster"
    parser.add_argument("suite", nargs="?", choices=[*_SUITES, cluster.SUITE], help=words)
    parser.add_argument("--quick", action="store_true", help="small sizes, few rounds: a smoke run")
    parser.add_argument("--device", default="cpu", help="cpu, cuda, npu, or one of several: cuda:1 (cpu)")
    parser.add_argument("--only", nargs="+", metavar="NAME", help="benchmarks whose names begin so (all)")
    parser.add_argument("--out", type=Path, metavar="PATH", help="folder for JSON (runs/bench); cluster: file, *.json")
    parser.add_argument("--nvme", type=Path, nargs="+", default=[], metavar="FOLDER", help="cluster: disks to measure")
    parser.set_defaults(run=run_bench)


def run_bench(options: argparse.Namespace) -> str:
    """Return the command's output. All ranks of a launcher measure; rank 0 writes and prints."""
    device = devices.get(options.device).device
    if options.suite == cluster.SUITE:
        return _bench_cluster(device, options)
    if options.nvme:
        raise ConfigError("--nvme", expected="bench cluster", got="another suite", do="Or run: npuzero check --nvme.")
    folder = options.out or Path("runs/bench")
    leads = read_launch().rank == 0
    chosen = {name: _SUITES[name] for name in ([options.suite] if options.suite else _SUITES)}
    wanted = {name: _select_names(suite.names(options.quick), options.only) for name, suite in chosen.items()}
    if not any(wanted.values()):
        known = ", ".join(name for suite in chosen.values() for name in suite.names(options.quick))
        raise ConfigError(
            "--only", expected=f"beginnings of {known}", got=" ".join(options.only), do="Name one of these."
        )
    texts = []
    for name, names in wanted.items():
        if names:
            record = Record.begin(name, _suite_command(name, options), machine_fingerprint(device), quick=options.quick)
            # Every rank iterates: the measurement is collective, even if only the first rank prints.
            for result in chosen[name].results(names, device, options.quick):
                record.results.append(result)
                if leads:
                    print(f"{result.name}: {_summarize_result(result)}", file=sys.stderr, flush=True)
            if leads:
                path = folder / f"{name}.json"
                record.write(path)
                texts.append(f"{render_record(record)}\n\nwritten to {path}")
    return "\n\n".join(texts)


def _bench_cluster(device: torch.device, options: argparse.Namespace) -> str:
    """Return the table of the machine's sustained rates, and write them to ``--out``."""
    if options.only:
        raise ConfigError("--only", expected="ops or comm", got="cluster, which needs all", do="Leave --only out.")
    leads = read_launch().rank == 0

    def say(text: str) -> None:
        if leads:
            print(text, file=sys.stderr, flush=True)

    found = cluster.measure_cluster(device, quick=options.quick, folders=options.nvme, say=say)[1]
    if not leads:
        return ""
    text = render_cluster(found) + "\n\nquick: these figures mean nothing" * options.quick
    if options.out is None:
        return f"{text}\n\n--out cluster.json keeps it, for: npuzero plan ... --on cluster.json"
    options.out.parent.mkdir(parents=True, exist_ok=True)
    found.write(options.out)
    return f"{text}\n\nwritten to {options.out}: npuzero plan ... --on {options.out}"


def render_cluster(found: Cluster) -> str:
    """Return a cluster as a table."""
    device = found.device
    rows = []
    for dtype, peak in device.flops.items():
        pace = device.pace(dtype)
        rows += [
            [f"{dtype}: largest product", f"{peak / 1e12:.4g} TFLOP/s"],
            ["  products of training", f"{pace.sustained:.0%} of that"],
            ["  they take beside their tokens as many more as", f"{pace.ramp_tokens:.0f} tokens"],
            ["  element-wise work of models", f"{pace.bytes_per_s / 1e9:.3g} GB/s"],
        ]
    rows += [
        ["memory", f"{device.memory_bytes / 1e9:.3g} GB"],
        ["memory read and written by an update", f"{device.memory_bytes_per_s / 1e9:.3g} GB/s"],
    ]
    for level, link in found.links.items():
        late = f", {link.latency_s * 1e6:.3g} µs a message" if link.latency_s else ""
        rows.append([f"link {level}", f"{link.bytes_per_s / 1e9:.3g} GB/s{late}"])
    rows.append(["compute and traffic side by side: beyond the longer", f"{found.contention:.0%} of the shorter"])
    nodes = f"{found.nodes} node{'s' * (found.nodes > 1)} of {found.local}"
    return f"{found.name}: {found.ranks} ranks, {nodes}\n\n{format_table(['each rank', 'measured'], rows)}"


def render_record(record: Record) -> str:
    """Return the record as a table with a block of rows per benchmark."""
    rows = []
    for result in record.results:
        rows.append([result.title, *[""] * 5])
        rows.extend([f"  {name}", *_format_contender(result, name)] for name in result.seconds)
    machine = record.machine
    where = f"{machine['device']}; torch {machine['torch']}, npuzero {machine['npuzero']} {machine['commit'] or ''}"
    title = f"{record.suite}, {record.date}{', quick: these figures mean nothing' * record.quick}\n{where}"
    return f"{title}\n\n{format_table(['', 'time', 'spread', 'GB/s', 'share', 'x'], rows)}"


def _format_contender(result: Result, name: str) -> list[str]:
    """Format time, spread, bytes per second, share of a probe's bandwidth, and speedup over the baseline."""
    seconds, speed = summarize(result.seconds[name]), result.gb_per_s(name)
    probe = next((probe for probe in PROBES if probe in result.seconds), None)
    probing = name in PROBES
    return [
        format_duration(seconds.median),
        f"{seconds.mad / seconds.median:.1%}",
        f"{speed:.1f}" if speed else "",
        f"{result.share(name, probe).median:.2f} of {probe}" if probe and not probing else "",
        "" if probing else f"{result.speedup(name).median:.2f}",
    ]


def format_duration(seconds: float) -> str:
    """Format seconds with three digits in a suitable unit."""
    for unit, size in (("s", 1.0), ("ms", 1e-3), ("µs", 1e-6)):
        if seconds >= size or unit == "µs":
            return f"{seconds / size:.3g} {unit}"
    raise AssertionError


def _summarize_result(result: Result) -> str:
    rounds = len(result.seconds[result.baseline])
    others = [name for name in result.seconds if name not in (result.baseline, *PROBES)]
    return ", ".join(f"{name} {result.speedup(name).median:.2f} x" for name in others) + f" ({rounds} rounds)"


def _select_names(names: Sequence[str], only: Sequence[str] | None) -> list[str]:
    return [name for name in names if only is None or name.startswith(tuple(only))]


def _suite_command(suite: str, options: argparse.Namespace) -> str:
    """Return the command that repeats the suite."""
    words = ["npuzero", "bench", suite, *["--quick"] * options.quick, "--device", options.device]
    return shlex.join([*words, *(["--only", *options.only] if options.only else [])])
