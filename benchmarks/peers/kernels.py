"""DeepSpeed's kernels compared with npuzero's and torch's. From the repository's root, or installed:

    python -m benchmarks.peers.kernels --out build/deepspeed.json        # about two minutes on two cores

The mixed step of ``npuzero bench ops`` with DeepSpeed's CPU Adam as a further contender, and the all_reduce of
``npuzero bench comm`` with DeepSpeed's in shared memory. All contenders run in the same processes, in DeepSpeed's
environment, which is created as for benchmarks.peers (see there for ``--pip``); DeepSpeed's kernels are compiled before
any measurement. Parts that cannot be installed, built or loaded are missing, with the reason in the record.
"""

from __future__ import annotations

import argparse
import os
import shlex
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from benchmarks.peers.environments import DEEPSPEED, NotInstalled
from benchmarks.step.compare import ROOT
from npuzero.bench import (
    Effort,
    Record,
    Result,
    Team,
    format_command,
    machine_fingerprint,
    python_worker,
    run_benchmark,
)
from npuzero.bench.record import benchmark_as_dict, benchmark_from_dict
from npuzero.bench.setting import ELEMENTS, QUICK_ELEMENTS, BenchmarkSetting
from npuzero.bench.suites import comm as collectives
from npuzero.bench.suites import ops
from npuzero.bench.suites.updates import MakeAdam, benchmark_mixed_step, torch_adam_factory
from npuzero.cli.bench import render_record

SUITE = "deepspeed"
ADAM, SHM = "DeepSpeed CPU Adam's passes", "DeepSpeed shared memory"

T = TypeVar("T")


def load_peer(name: str, load: Callable[[], T]) -> tuple[dict[str, T], dict[str, str]]:
    """Return the result of ``load`` by ``name``; or the reason for its failure, by ``name``."""
    try:
        return {name: load()}, {}
    except Exception as error:  # a build may raise anything
        return {}, {name: f"{type(error).__name__}: {error}"}


def deepspeed_cpu_adam() -> MakeAdam:
    """Make DeepSpeed's optimizer as ``torch_adam`` makes torch's."""
    from deepspeed.ops.adam import DeepSpeedCPUAdam

    return torch_adam_factory(DeepSpeedCPUAdam, adamw_mode=True)


def deepspeed_shared_memory(rank: int, size: int) -> collectives.Call:
    """Return DeepSpeed's all_reduce in shared memory, as its communication backend calls it.

    Its files would outlive the run: they are unlinked once every rank has opened them.
    """
    from deepspeed.ops.op_builder import ShareMemCommBuilder

    os.environ["LOCAL_SIZE"] = str(size)  # tells it that all ranks are on this host
    ShareMemCommBuilder().load().initialize(size, rank)
    dist.barrier()
    words = ("deepspeed_allreduce_buffer", os.getuid(), os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"], rank)
    Path("/dev/shm", "_".join(map(str, words))).unlink()
    all_reduce = torch.ops.deepspeed.inference_all_reduce_
    return lambda out, inp: all_reduce(inp)


class MixedStepWork:
    """The work of a team of one rank."""

    def measure(self, elements: int, effort: Mapping[str, Any]) -> dict[str, Any]:
        others, missing = load_peer(ADAM, deepspeed_cpu_adam)
        result = run_benchmark(benchmark_mixed_step(BenchmarkSetting(elements), others), Effort(**effort))
        result.parameters["missing"] = missing
        return benchmark_as_dict(result)


class AllReduceWork(collectives.CommBenchmarkRank):
    """The work of one rank of several."""

    def __init__(self, rank: int, size: int) -> None:
        super().__init__("cpu")
        found, self.missing = load_peer(SHM, lambda: deepspeed_shared_memory(rank, size))
        self.others = {"all_reduce": found}

    def result(self, name: str, effort: Effort) -> Result:
        result = super().result(name, effort)
        result.parameters["missing"] = self.missing
        return result


def make(rank: int, size: int, options: Mapping[str, Any]) -> MixedStepWork | AllReduceWork:
    """Make the work for npuzero.bench.worker."""
    return MixedStepWork() if size == 1 else AllReduceWork(rank, size)


def peer_results(python: str, quick: bool) -> Iterator[Result]:
    """Measure everything in processes of ``python``: one with all cores, and two ranks."""
    variables = DEEPSPEED.variables | {"PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    worker = python_worker("benchmarks.peers.kernels", python)
    cores = len(os.sched_getaffinity(0))
    with Team("mixed step", worker, 1, threads=cores, variables=variables) as team:
        elements = QUICK_ELEMENTS if quick else ELEMENTS
        yield benchmark_from_dict(team.ask("measure", elements=elements, effort=asdict(ops.ops_effort(quick)))[0])
    with Team("2 ranks", worker, 2, threads=max(1, cores // 2), variables=variables) as team:
        for name in collectives.comm_benchmark_names(quick):
            if name.startswith("all_reduce/"):
                told = team.ask("measure", name=name, effort=asdict(collectives.comm_effort(quick)))
                yield benchmark_from_dict(told[0])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pip", type=shlex.split, default=[], help="further arguments of pip install")
    parser.add_argument("--quick", action="store_true", help="small sizes, few rounds: a smoke run")
    parser.add_argument("--out", type=Path, default=Path("runs/bench/deepspeed.json"), metavar="FILE", help="for JSON")
    options = parser.parse_args()
    python, made, reason = str(DEEPSPEED.python), {}, ""
    try:
        made = DEEPSPEED.ensure(options.pip)
    except NotInstalled as error:
        python, reason = sys.executable, str(error)
    record = Record.begin(SUITE, format_command(), machine_fingerprint(), quick=options.quick)
    for result in peer_results(python, options.quick):
        result.name = f"{SUITE}/{result.name}"
        result.parameters["environment"] = made
        if reason:
            result.parameters["missing"] = dict.fromkeys(result.parameters["missing"], reason)
        record.results.append(result)
    record.write(options.out)
    print(render_record(record))
    missing = {name: why for result in record.results for name, why in result.parameters["missing"].items()}
    print("".join(f"{name} is missing: {why}\n" for name, why in missing.items()))


if __name__ == "__main__":
    main()
