"""Training with optimizer states on a disk: npuzero, DeepSpeed's NVMe offload, and memory-mapped states.

    python -m benchmarks.peers.nvme --folder /mnt/disk --tune --out build/deepspeed-nvme.json       # about 5 minutes
    python -m benchmarks.peers.nvme --folder /mnt/disk --tuned build/deepspeed-nvme.json --out build/nvme-bf16.json
    python -m benchmarks.peers.nvme --folder /mnt/disk --contenders npuzero-blocking,mapped --precision fp32

All contenders train one workload in bf16 with float32 masters (or in float32), on one disk, used by one of them at a
time. Each must first reproduce plain torch's losses. Two times are then measured in rounds: the update alone, to the
end of its writes, and full steps, in which npuzero's update overlaps with the next forward. DeepSpeed's settings are
tuned first, one kind after another (``--tune`` does only that, ``--tuned`` reads its file); the fastest settings take
part, and all are in the record.

DeepSpeed compiles its aio at first use, which needs libaio's headers (Debian: ``apt-get install libaio-dev``). Its
environment is that of benchmarks.peers (see there for ``--pip``). Contenders that cannot run are listed as missing,
with the reason.

The page cache is excluded: npuzero and DeepSpeed bypass it (O_DIRECT). Mapped states are in a control group limited to
1.05 of the peak of npuzero's process, cache included; if none can be created, only ``mapped-dropped`` runs, which
writes and drops each block's pages after its update. The record contains each contender's bytes read from and written
to the disk per step, as counted by the system.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import shlex
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.peers import offloaded
from benchmarks.peers.environments import DEEPSPEED, NotInstalled
from benchmarks.step.compare import COMPUTE, ComparisonEntry, ContenderTeams, add_comparison_options, comparison_table
from npuzero.bench import (
    Benchmark,
    Contender,
    Effort,
    Record,
    Result,
    Team,
    format_command,
    machine_fingerprint,
    median,
    run_benchmark,
)
from npuzero.bench.group import ControlGroup, open_control_group
from npuzero.cli.output.table import format_table as tabular
from npuzero.errors import BenchmarkError

SUITE = "nvme"
MAPPED = ("mapped", "mapped-dropped")
#: Memory limit of mapped states, relative to npuzero's peak.
BEYOND = 1.05
_MIB = 2**20

#: DeepSpeed's settings to try, by kind; the first of each kind is kept until another is faster.
_AIO = {"single_submit": False, "overlap_events": True}
_CHOICES: dict[str, tuple[dict[str, Any], ...]] = {
    "aio": (
        {"block_size": 8 * _MIB, "queue_depth": 32, "intra_op_parallelism": 4, **_AIO},
        {"block_size": _MIB, "queue_depth": 32, "intra_op_parallelism": 4, **_AIO},
        {"block_size": _MIB, "queue_depth": 8, "intra_op_parallelism": 1, **_AIO},
    ),
    # Three states of a sub-group are read, updated and written at a time, each in separate buffers.
    "offload_optimizer": (
        {"buffer_count": 12, "pipeline_read": True, "pipeline_write": True},
        {"buffer_count": 4},
    ),
    # A sub-group is in memory at once; the default would be all parameters.
    "sub_group": ({"sub_group_size": 10**7}, {"sub_group_size": 4 * 10**7}),
}


def tune_deepspeed(update_s: Callable[[dict[str, Any]], float]) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Find the settings with the fastest update, kind by kind; also return each trial with its time or failure."""
    chosen = {kind: choices[0] for kind, choices in _CHOICES.items()}
    tried: list[dict[str, Any]] = []

    def seconds(settings: dict[str, Any]) -> float:
        try:
            tried.append({"settings": settings, "update_s": update_s(settings)})
        except BenchmarkError as reason:
            tried.append({"settings": settings, "failed": str(reason)})
        print(json.dumps(tried[-1]), flush=True)
        return float(tried[-1].get("update_s", math.inf))

    least = seconds(chosen)
    for kind, choices in _CHOICES.items():
        for choice in choices[1:]:
            settings = chosen | {kind: choice}
            if (found := seconds(settings)) < least:
                least, chosen = found, settings
    if least == math.inf:
        raise NotInstalled(tried[0]["failed"])
    return chosen, tried


def nvme_entry(
    name: str, folder: Path, settings: Mapping[str, Any] | None = None, capped: ControlGroup | None = None
) -> ComparisonEntry:
    """Return a contender of benchmarks.peers.offloaded, in its environment."""
    variables = {"NPUZERO_NVME_PATHS": str(folder)}
    contender = f"{offloaded.__name__}:{name}"
    if name != "deepspeed":
        return ComparisonEntry(name, contender, peer=name in MAPPED, variables=variables, group=capped)
    variables |= DEEPSPEED.variables | {offloaded.TUNING: json.dumps(settings)}
    return ComparisonEntry(name, contender, python=str(DEEPSPEED.python), peer=True, variables=variables)


def deepspeed_update_s(options: argparse.Namespace, settings: dict[str, Any]) -> float:
    """Return the minimum of three updates."""
    comparison = ContenderTeams([nvme_entry("deepspeed", options.folder, settings)], options, {})
    with ExitStack() as stack:
        comparison.start(stack)
        for reason in comparison.missing.values():
            raise BenchmarkError("DeepSpeed", expected="an update", got=reason, do="See whether its aio is built.")
        return min(_time_updates(comparison.teams["deepspeed"], 1) for _ in range(3))


def load_or_tune(options: argparse.Namespace) -> dict[str, Any]:
    """Return DeepSpeed's settings and all trials, from a file or tuned now."""
    if options.tuned is not None:
        return dict(json.loads(options.tuned.read_text()))
    settings, tried = tune_deepspeed(partial(deepspeed_update_s, options))
    return {"tuned": settings, "tried": tried}


def measure_updates(comparison: ContenderTeams, options: argparse.Namespace, checked: str, name: str) -> Result:
    """Time the updates alone, of contenders that wait for theirs."""
    waiting = {who: team for who, team in comparison.teams.items() if f"{who}-blocking" not in comparison.teams}
    del waiting[COMPUTE.name]
    contenders = [Contender(who, partial(_time_updates, team)) for who, team in waiting.items()]
    effort = Effort(min(5, options.rounds), options.rounds, options.seconds, visit_s=0.0, warm_up=1)
    title = f"update, states on a disk, {comparison.workload.precision}"
    return run_benchmark(Benchmark(name, title, contenders, next(iter(waiting)), lambda: checked, {}), effort)


def _time_updates(team: Team, count: int) -> float:
    seconds = sum(max(team.ask("update_s")) for _ in range(count)) / count
    print(f"  {team.name}: update {seconds:.3f} s", flush=True)
    return seconds


def format_updates(updates: Result, steps: Result) -> str:
    """Format seconds of updates, multiples of the first contender's, and disk bytes per step, for people."""
    lines = []
    for name, seconds in updates.seconds.items():
        slow, disk = updates.slowdown(name), steps.values[name]["disk_bytes"]
        moved = [f"{disk[way] / 1e9:.2f}" for way in ("read", "written")]
        lines.append([name, f"{median(seconds):.3f}", f"{slow.median:.2f}", f"{slow.mad:.2f}", *moved])
    return tabular(["update alone", "s", f"times {updates.baseline}'s", "MAD", "GB read", "GB written"], lines)


def build_entries(
    options: argparse.Namespace, stack: ExitStack
) -> tuple[list[ComparisonEntry], dict[str, str], dict[str, Any]]:
    """Build the entries, mapped ones in control groups that ``stack`` closes; also return missing ones, and facts."""
    missing: dict[str, str] = {}
    facts: dict[str, Any] = {}
    entries = [COMPUTE]
    for name in options.contenders:
        if name != "deepspeed":
            capped = stack.enter_context(open_control_group()) if name in MAPPED else None
            if name == "mapped" and capped is None:
                missing[name] = "this process may make no control group"
            else:
                entries.append(nvme_entry(name, options.folder, capped=capped))
            continue
        try:
            facts["environments"] = {DEEPSPEED.name: DEEPSPEED.ensure(options.pip)}
            DEEPSPEED.run("-c", "from deepspeed.ops.op_builder import AsyncIOBuilder; AsyncIOBuilder().load()")
            facts |= load_or_tune(options)
            entries.append(nvme_entry(name, options.folder, facts["tuned"]))
        except NotInstalled as reason:
            missing[name] = str(reason)
    return entries, missing, facts


def cap_mapped_memory(entries: Sequence[ComparisonEntry], teams: Mapping[str, Team]) -> int | None:
    """Hold mapped states to slightly more than npuzero's peak, and return that limit; None without either."""
    groups = [entry.group for entry in entries if entry.group is not None and entry.name in teams]
    if not groups or "npuzero-blocking" not in teams:
        return None
    limit = int(teams["npuzero-blocking"].ask("peak")[0] * BEYOND)
    print(f"mapped states have a cap of {limit / 1e6:.0f} MB", flush=True)
    for capped in groups:
        capped.limit(limit)
    return limit


def main(arguments: Sequence[str] | None = None) -> None:
    known = tuple(offloaded.CONTENDERS)
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, required=True, help="on the disk to measure")
    parser.add_argument("--contenders", type=lambda text: text.split(","), default=known, help="with commas")
    parser.add_argument("--pip", type=shlex.split, default=[], help="further arguments of pip install")
    parser.add_argument("--tune", action="store_true", help="find DeepSpeed's settings, write them to --out, and end")
    parser.add_argument("--tuned", type=Path, help="a file with settings of DeepSpeed that --tune wrote")
    add_comparison_options(parser)
    parser.set_defaults(rounds=7, seconds=120.0, ranks=1, threads=len(os.sched_getaffinity(0)), visit=0.0)
    options = parser.parse_args(arguments)
    unknown = set(options.contenders) - set(known)
    if unknown:
        parser.error(f"no such contenders: {', '.join(sorted(unknown))}; there are {', '.join(known)}")
    if options.precision == "fp32":  # these are precisions of bf16
        options.contenders = [name for name in options.contenders if "8bit" not in name and "split" not in name]
    if options.ranks > 1:  # each rank would train for itself
        options.contenders = [name for name in options.contenders if name not in MAPPED]

    if options.tune:
        DEEPSPEED.ensure(options.pip)
        found = json.dumps(load_or_tune(options), indent=1)
        options.out.write_text(found + "\n") if options.out is not None else print(found)
        return
    record = Record.begin(SUITE, format_command(), machine_fingerprint())
    with ExitStack() as stack:
        entries, missing, facts = build_entries(options, stack)
        comparison = ContenderTeams(entries, options, missing)
        kind = f"{comparison.workload.precision}-{comparison.ranks}"
        comparison.start(stack)
        facts["cap_bytes"] = cap_mapped_memory(entries, comparison.teams)
        steps = comparison.measure(f"{SUITE}/step-{kind}", f"training step, {kind}, states on a disk")
        updates = measure_updates(comparison, options, steps.checked, f"{SUITE}/update-{kind}")
    steps.parameters |= facts
    updates.parameters |= steps.parameters
    record.results += [steps, updates]
    print(comparison_table(steps), format_updates(updates, steps), sep="\n\n")
    if options.out is not None:
        record.write(options.out)


if __name__ == "__main__":
    main()
