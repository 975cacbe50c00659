"""Steps of npuzero on this machine compared with the planner's predictions. From the repository's root, or installed:

    python -m benchmarks.planning.against_steps --out benchmarks/results/planned-cpu.json   # 2 ranks, batch 1 and 4
    python -m benchmarks.planning.against_steps --precision fp32                            # about 5 minutes each
    python -m benchmarks.planning.against_steps --quick                                     # a smoke run

The probes of `npuzero bench cluster` and the steps take turns in the same rounds, so that speed changes of the machine
affect both. The probes' medians define the cluster, and the cluster the planner's step. No step's time is used for it.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

from benchmarks.step.compare import BANDS, ROOT
from benchmarks.step.workload import GPTWorkload
from npuzero.bench import (
    Benchmark,
    Effort,
    Record,
    Result,
    Team,
    format_command,
    machine_fingerprint,
    python_worker,
    run_benchmark,
)
from npuzero.bench.suites.cluster import build_cluster, describe_measurement, open_probe_crew
from npuzero.errors import BenchmarkError
from npuzero.plan import MeshShape, Plan
from npuzero.planner import Cluster, ModelShape, TrainingJob, TrainingRun
from npuzero.planner.model_work.units import measure_workload
from npuzero.planner.timing.clock import StepTimeline, step_time
from npuzero.shard.build import get_unit_parameters, nested_unit_spans

PRESETS, BATCHES = ("zero0", "zero2", "zero3"), (1, 4)
SUITE, PROBES = "planned", "planned/probes"


def gpt_model_shape(sizes: GPTWorkload) -> ModelShape:
    """Return the benchmarks' GPT as the planner's ModelShape."""
    with torch.device("meta"):
        model = sizes.model()
    names = ["", *(f"blocks.{i}" for i in range(sizes.layers))]
    return ModelShape("GPT of the benchmarks", get_unit_parameters(model), nested_unit_spans(names), lambda: model)


def plan_step(sizes: GPTWorkload, preset: str, cluster: Cluster) -> StepTimeline:
    """Return the planner's step of one preset on all ranks of ``cluster``."""
    model = gpt_model_shape(sizes)
    job = TrainingJob(model, cluster, sizes.sequence)
    mesh = MeshShape(cluster.nodes, cluster.local)
    run_ = TrainingRun(Plan.preset(preset, precision=sizes.precision), mesh, micro_batch=sizes.batch)
    return step_time(job, run_, measure_workload(model, sizes.sequence, sizes.batch, dtype=sizes.dtype))


def planned_benchmark_name(sizes: GPTWorkload) -> str:
    return f"{SUITE}/{sizes.precision}-batch{sizes.batch}"


def start_planned_teams(
    sizes: Sequence[GPTWorkload], options: argparse.Namespace, stack: ExitStack
) -> dict[tuple[str, str], Team]:
    """Start the ranks of each preset at each size, by name and preset, and check that their losses agree."""
    found: dict[tuple[str, str], Team] = {}
    variables = {"PYTHONPATH": os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))}
    for each in sizes:
        losses: dict[str, float] = {}
        for preset in options.presets:
            print(f"starting {preset}, batch {each.batch}", file=sys.stderr, flush=True)
            team = Team(
                f"{planned_benchmark_name(each)} {preset}",
                python_worker("benchmarks.step.work"),
                options.ranks,
                options={
                    "contender": f"benchmarks.step.contenders:{preset}",
                    "batches": [[rank] for rank in range(options.ranks)],
                    "workload": asdict(each),
                },
                variables=variables,
                start_s=600.0,
            )
            found[planned_benchmark_name(each), preset] = stack.enter_context(team)
            losses[preset] = statistics.fmean(team.ask("train", steps=2)[0])
        if max(losses.values()) - min(losses.values()) > BANDS[each.precision]:
            raise BenchmarkError("losses", expected="equal ones under all presets", got=str(losses), do="Correct it.")
    return found


def measure_planned(sizes: Sequence[GPTWorkload], options: argparse.Namespace) -> tuple[Result, Mapping[str, Any]]:
    """Time probes and steps in the same rounds; return their times and the machine's description."""
    with ExitStack() as stack:
        started = start_planned_teams(sizes, options, stack)
        probes = stack.enter_context(open_probe_crew(torch.device("cpu"), options.quick))
        steps = [replace(team.contender(), name=" ".join(key)) for key, team in started.items()]
        contenders = [*probes.contenders(), *steps]
        effort = Effort(min(5, options.rounds), options.rounds, options.seconds, visit_s=options.visit, warm_up=1)
        checked = f"losses of all presets within {BANDS[options.precision]} of each other"
        benchmark = Benchmark(PROBES, "what this machine sustains", contenders, steps[0].name, lambda: checked)
        return run_benchmark(benchmark, effort), probes.place


def planned_results(
    sizes: Sequence[GPTWorkload], presets: Sequence[str], whole: Result, place: Mapping[str, Any]
) -> list[Result]:
    """Return the probes with the cluster derived from them, and for each size the steps with their predictions."""
    names = [f"{planned_benchmark_name(each)} {preset}" for each in sizes for preset in presets]
    probes = [name for name in whole.seconds if name not in names]
    source = describe_measurement(torch.device("cpu"))
    cluster = build_cluster({name: whole.seconds[name] for name in probes}, whole.values, place, source=source)
    facts = {"cluster": cluster.as_dict()}
    found = [
        _select_contenders(
            whole, PROBES, {name: name for name in probes}, "passes/bf16/1", "what this machine sustains", facts
        )
    ]
    for each in sizes:
        steps = {f"{planned_benchmark_name(each)} {preset}": f"npuzero {preset}" for preset in presets}
        title = f"a training step, {each.precision}, batch {each.batch} a rank, and what the planner says"
        part = _select_contenders(
            whole, planned_benchmark_name(each), steps, f"npuzero {presets[0]}", title, asdict(each)
        )
        for preset in presets:
            timeline = plan_step(each, preset, cluster)
            part.values[f"npuzero {preset}"] = {"planned_s": timeline.step_s, "parts_s": dict(timeline.parts)}
        found.append(part)
    return found


def _select_contenders(
    whole: Result, name: str, names: Mapping[str, str], baseline: str, title: str, parameters: Mapping[str, Any]
) -> Result:
    """Return the contenders ``names`` of a result, renamed, as a separate result."""
    seconds, calls, nbytes, values = (
        {new: table[old] for old, new in names.items()}
        for table in (whole.seconds, whole.calls, whole.nbytes, whole.values)
    )
    return Result(
        name,
        title,
        baseline,
        whole.checked,
        dict(parameters),
        whole.ended_by,
        seconds,
        calls,
        nbytes,
        values,  # type: ignore[arg-type]
    )


def planned_errors(result: Result) -> dict[str, float]:
    """Return the relative error of the planned seconds, by contender."""
    return {
        name: values["planned_s"] / statistics.median(result.seconds[name]) - 1
        for name, values in result.values.items()
        if "planned_s" in values
    }


def planned_table(found: Sequence[Result]) -> str:
    """Format the comparison as a table, for people."""
    lines = [f"{'':34}{'planned':>10} {'measured':>10} {'MAD':>6} {'apart':>7}   planned: of what"]
    for result in found:
        for name, apart in planned_errors(result).items():
            seconds, values = result.seconds[name], result.values[name]
            middle = statistics.median(seconds)
            spread = statistics.median(abs(each - middle) for each in seconds) / middle
            parts = ", ".join(f"{part} {s * 1e3:.0f}" for part, s in values["parts_s"].items() if s > 5e-4)
            label = f"{result.name.partition('/')[2]} {name}"
            took = f"{values['planned_s'] * 1e3:>7.0f} ms {middle * 1e3:>7.0f} ms"
            lines.append(f"{label:34}{took} {spread:>6.1%} {apart:>+7.1%}   {parts}")
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    split = {"type": lambda text: text.split(","), "help": "with commas"}
    parser.add_argument("--presets", default=list(PRESETS), **split)
    parser.add_argument("--batches", default=list(map(str, BATCHES)), **split)
    GPTWorkload.add_options(parser)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=15, help="at the most")
    parser.add_argument("--seconds", type=float, default=240.0, help="of rounds, at the most")
    parser.add_argument("--visit", type=float, default=0.3, help="seconds that each is timed in a round, at the least")
    parser.add_argument("--quick", action="store_true", help="small sizes, few rounds: that it works")
    parser.add_argument("--out", type=Path, help="write the record there (JSON)")
    options = parser.parse_args(arguments)
    if options.quick:
        small = {"dim": 64, "layers": 2, "heads": 2, "sequence": 64}
        vars(options).update(small, rounds=3, seconds=2.0, visit=0.01)
    sizes = [replace(GPTWorkload.of(options), batch=int(batch)) for batch in options.batches]
    record = Record.begin(SUITE, format_command(), machine_fingerprint(), quick=options.quick)
    record.results += planned_results(sizes, options.presets, *measure_planned(sizes, options))
    print(planned_table(record.results))
    if options.out is not None:
        record.write(options.out)


if __name__ == "__main__":
    main()
