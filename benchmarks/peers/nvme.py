"""Training with optimizer states on a disk: npuzero beside DeepSpeed's NVMe offload and memory-mapped states.

    python -m benchmarks.peers.nvme --folder /mnt/disk --dim 1024 --layers 16 --out build/nvme.json
    python -m benchmarks.peers.nvme --folder /mnt/disk --contenders npuzero,mapped --precision fp32

All contenders train one workload in bf16 with float32 masters (or in float32), on one disk, which one of them uses at a
time: first each must learn what plain torch learns, then two things are measured in rounds, the update alone, to the
end of its writes, and whole steps, in which npuzero's runs beside the next forward. DeepSpeed's settings are tried
first (``--tuned`` names one, as printed, and spares that); the quickest takes part, and all are in the record.

DeepSpeed compiles its aio at first use, which needs libaio's headers (Debian: ``apt-get install libaio-dev``). Its
environment is that of benchmarks.peers (see there for ``--pip``). What cannot take part is missing, with the reason.
The memory that mapped states need is written back and dropped with each update, as a cap below them would have it.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import shlex
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.peers import offloaded
from benchmarks.peers.environments import DEEPSPEED, NotInstalled
from benchmarks.step.compare import COMPUTE, Comparison, Entry, add_options, table
from npuzero.bench import Benchmark, Contender, Effort, Record, Result, Team, fingerprint, run
from npuzero.cli.table import table as tabular
from npuzero.errors import BenchmarkError

SUITE = "nvme"
_MIB = 2**20

#: What is tried of DeepSpeed: its defaults are the first.
_PIPELINES = ({}, {"pipeline_read": True, "pipeline_write": True})
_AIO = (
    {"block_size": _MIB, "queue_depth": 8, "intra_op_parallelism": 1},
    {"block_size": _MIB, "queue_depth": 32, "intra_op_parallelism": 4},
    {"block_size": 8 * _MIB, "queue_depth": 32, "intra_op_parallelism": 4},
)
_SUB_GROUPS = (10**9, 10**7)


def candidates() -> Iterator[dict[str, Any]]:
    """Settings of DeepSpeed to be tried."""
    for pipeline, aio, numel in itertools.product(_PIPELINES, _AIO, _SUB_GROUPS):
        yield {
            # Three states of a sub-group are read, updated and written at a time, each in buffers of its own.
            "offload_optimizer": {"buffer_count": 12 if pipeline else 4, **pipeline},
            "aio": {**aio, "single_submit": False, "overlap_events": True},
            "sub_group_size": numel,
        }


def entry(name: str, folder: Path, tuning: Mapping[str, Any] | None = None) -> Entry:
    """A contender of benchmarks.peers.offloaded, in its environment."""
    variables = {"NPUZERO_NVME_PATHS": str(folder)}
    contender = f"{offloaded.__name__}:{name}"
    if name != "deepspeed":
        return Entry(name, contender, peer=name == "mapped", variables=variables)
    variables |= DEEPSPEED.variables | {offloaded.TUNING: json.dumps(tuning)}
    return Entry(name, contender, python=str(DEEPSPEED.python), peer=True, variables=variables)


def tuned(options: argparse.Namespace) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """The settings with which DeepSpeed's update is the quickest of a few; what each took, or why it did not."""
    if options.tuned:
        return options.tuned, []
    tried: list[dict[str, Any]] = []
    for tuning in candidates():
        comparison = Comparison([entry("deepspeed", options.folder, tuning)], options, {})
        with ExitStack() as stack:
            comparison.start(stack)
            if comparison.missing:
                tried.append({"settings": tuning, "failed": next(iter(comparison.missing.values()))})
            else:
                team = comparison.teams["deepspeed"]
                tried.append({"settings": tuning, "update_s": min(max(team.ask("update_s")) for _ in range(3))})
    working = [each for each in tried if "update_s" in each]
    if not working:
        raise NotInstalled(tried[0]["failed"])
    return min(working, key=lambda each: float(each["update_s"]))["settings"], tried


def measure_updates(comparison: Comparison, options: argparse.Namespace, checked: str, name: str) -> Result:
    """Times the updates alone, of contenders that wait for their own."""
    waiting = {who: team for who, team in comparison.teams.items() if f"{who}-blocking" not in comparison.teams}
    del waiting[COMPUTE.name]
    contenders = [Contender(who, partial(_update_s, team)) for who, team in waiting.items()]
    effort = Effort(min(5, options.rounds), options.rounds, options.seconds, visit_s=0.0, warm_up=1)
    title = f"update, states on a disk, {comparison.workload.precision}"
    return run(Benchmark(name, title, contenders, next(iter(waiting)), lambda: checked, {}), effort)


def _update_s(team: Team, count: int) -> float:
    return sum(max(team.ask("update_s")) for _ in range(count)) / count


def updates_as_text(result: Result) -> str:
    """For people: seconds, and times the first contender's."""
    lines = [
        [name, f"{sorted(seconds)[len(seconds) // 2]:.3f}", f"{result.slowdown(name).median:.2f}"]
        for name, seconds in result.seconds.items()
    ]
    return tabular(["update alone", "s", f"times {result.baseline}'s"], lines)


def take_part(options: argparse.Namespace) -> tuple[list[Entry], dict[str, str], dict[str, Any]]:
    """The entries, what is missing and why, and facts for the record."""
    missing: dict[str, str] = {}
    facts: dict[str, Any] = {"folder_device": os.stat(options.folder).st_dev}
    entries = [COMPUTE]
    for name in options.contenders:
        if name != "deepspeed":
            entries.append(entry(name, options.folder))
            continue
        try:
            facts["environments"] = {DEEPSPEED.name: DEEPSPEED.ensure(options.pip)}
            DEEPSPEED.run("-c", "from deepspeed.ops.op_builder import AsyncIOBuilder; AsyncIOBuilder().load()")
            settings, facts["tried"] = tuned(options)
            facts["tuned"] = settings
            entries.append(entry(name, options.folder, settings))
        except (NotInstalled, BenchmarkError) as reason:
            missing[name] = str(reason)
    return entries, missing, facts


def main(arguments: Sequence[str] | None = None) -> None:
    known = tuple(offloaded.CONTENDERS)
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, required=True, help="on the disk to measure")
    parser.add_argument("--contenders", type=lambda text: text.split(","), default=known, help="with commas")
    parser.add_argument("--pip", type=shlex.split, default=[], help="further arguments of pip install")
    parser.add_argument("--tuned", type=json.loads, help="settings of DeepSpeed, as a run has printed them")
    add_options(parser)
    parser.set_defaults(rounds=9, seconds=600.0, ranks=1, threads=len(os.sched_getaffinity(0)), visit=0.0)
    options = parser.parse_args(arguments)
    unknown = set(options.contenders) - set(known)
    if unknown:
        parser.error(f"no such contenders: {', '.join(sorted(unknown))}; there are {', '.join(known)}")
    if options.precision == "fp32":  # 8-bit moments are a precision of bf16
        options.contenders = [name for name in options.contenders if "8bit" not in name]
    if options.ranks > 1:  # each rank would train for itself
        options.contenders = [name for name in options.contenders if name != "mapped"]

    record = Record.begin(SUITE, shlex.join(["python", *sys.orig_argv[1:]]), fingerprint())
    entries, missing, facts = take_part(options)
    comparison = Comparison(entries, options, missing)
    kind = f"{comparison.workload.precision}-{comparison.ranks}"
    with ExitStack() as stack:
        comparison.start(stack)
        steps = comparison.measure(f"{SUITE}/step-{kind}", f"training step, {kind}, states on a disk")
        updates = measure_updates(comparison, options, steps.checked, f"{SUITE}/update-{kind}")
    for result in (steps, updates):
        result.parameters |= facts
    record.results += [steps, updates]
    print(table(steps), updates_as_text(updates), sep="\n\n")
    if "tuned" in facts:
        print(f"\nDeepSpeed's settings: --tuned {shlex.quote(json.dumps(facts['tuned']))}")
    if options.out is not None:
        record.write(options.out)


if __name__ == "__main__":
    main()
