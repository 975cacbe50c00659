"""Comparison of contenders' training steps in one run: start, check, time in rounds, inspect, record.

Without a launcher it starts all ranks of every contender itself. Under torchrun each process starts its own rank of
every contender, and all processes take the same turns; so the same command measures one host and many.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import npuzero
from benchmarks.step.workload import GPTWorkload
from npuzero import observe
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
from npuzero.bench.group import ControlGroup
from npuzero.comm import World
from npuzero.errors import BenchmarkError

ROOT = Path(__file__).resolve().parents[2]
BASELINE = "compute only"

#: Allowed difference of a loss from plain torch's on the same batches. In bf16 every contender rounds communicated
#: gradients differently.
BANDS = {"fp32": 1e-4, "bf16": 1e-2}


@dataclass(frozen=True)
class ComparisonEntry:
    """A contender of a comparison.

    Attributes:
        name: for people.
        contender: "module:name", see work.py.
        python: the interpreter of its environment.
        trains: its ranks train one model together, so that its losses can be checked.
        peer: not npuzero's: a failed start or different losses are reported as a result, not raised as an error.
        variables: of its environment.
        group: the control group that its ranks join, if any.
    """

    name: str
    contender: str
    python: str = sys.executable
    trains: bool = True
    peer: bool = False
    variables: Mapping[str, str] = field(default_factory=dict)
    group: ControlGroup | None = None


COMPUTE = ComparisonEntry(BASELINE, "benchmarks.step.contenders:compute", trains=False)
ALONE = ComparisonEntry("independent ranks", "benchmarks.step.contenders:alone", trains=False)


def preset_entry(preset: str) -> ComparisonEntry:
    """Return the entry of npuzero under a preset."""
    return ComparisonEntry(f"npuzero {preset}", f"benchmarks.step.contenders:{preset}")


def add_comparison_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of every comparison."""
    GPTWorkload.add_options(parser)
    parser.add_argument("--ranks", type=int, default=2, help="on this host; under torchrun its own count holds")
    parser.add_argument("--threads", type=int, default=1, help="of each rank")
    parser.add_argument("--rounds", type=int, default=9, help="at the most")
    parser.add_argument("--seconds", type=float, default=300.0, help="of rounds, at the most")
    parser.add_argument(
        "--visit", type=float, default=0.5, help="seconds a contender is timed in a round, at the least"
    )
    parser.add_argument("--checked", type=int, default=3, help="steps whose losses are compared with plain torch's")
    parser.add_argument("--out", type=Path, help="write the record there (JSON)")


class ContenderTeams:
    """The teams of a comparison, all alive at the same time."""

    def __init__(
        self, entries: Sequence[ComparisonEntry], options: argparse.Namespace, missing: Mapping[str, str]
    ) -> None:
        self.workload = GPTWorkload.of(options)
        self.world: World = npuzero.init("cpu")
        self.launched = self.world.size > 1
        self.ranks: int = self.world.size if self.launched else options.ranks
        self._options = options
        self._entries = {entry.name: entry for entry in entries}
        self.teams: dict[str, Team] = {}
        self.missing = dict(missing)

    def start(self, stack: ExitStack) -> None:
        """Start and check every contender. A failing peer is closed and recorded as missing, with the reason."""
        reference = self._reference_losses()
        for place, entry in enumerate(self._entries.values()):
            print(f"starting {entry.name}", file=sys.stderr, flush=True)
            own = stack.enter_context(ExitStack())
            try:
                team = own.enter_context(self._team(entry, [[rank] for rank in range(self.ranks)], place))
                self._check(entry, team, reference)
            except BenchmarkError as error:
                if not entry.peer:
                    raise
                own.close()
                self.missing[entry.name] = f"{error.got} (expected: {error.expected})"
            else:
                self.teams[entry.name] = team
        wanted = ", ".join(f"{loss:.4f}" for loss in reference)
        band = BANDS[self.workload.precision]
        self._checked = f"losses of {len(reference)} steps within {band} of plain torch's: {wanted}"

    def measure(self, name: str, title: str) -> Result:
        """Time all contenders, then inspect each."""
        options = self._options
        effort = Effort(min(5, options.rounds), options.rounds, options.seconds, visit_s=options.visit, warm_up=1)
        contenders = [team.contender() for team in self.teams.values()]
        parameters = asdict(self.workload) | {"ranks": self.ranks, "threads": options.threads}
        parameters["missing"] = self.missing
        benchmark = Benchmark(name, title, contenders, BASELINE, lambda: self._checked, parameters)
        result = run_benchmark(benchmark, effort, combine=self._greatest)
        for contender in result.seconds:
            result.values[contender] = self._look(contender)
        add_beyond_plan(result.values)
        return result

    def _check(self, entry: ComparisonEntry, team: Team, reference: list[float]) -> None:
        """Check that a contender reproduces plain torch's losses."""
        by_rank = self._of_all(team.ask("train", steps=len(reference)))
        losses = [statistics.fmean(values) for values in zip(*by_rank, strict=True)]
        band = BANDS[self.workload.precision]
        if entry.trains and not all(abs(loss - wanted) <= band for loss, wanted in zip(losses, reference, strict=True)):
            raise BenchmarkError(
                f"losses of {entry.name}",
                expected=f"within {band} of {reference}",
                got=str(losses),
                do="No figure is taken of a contender that learns something else: correct it.",
            )

    def _reference_losses(self) -> list[float]:
        """Return plain torch's losses, with one process taking the batches of all ranks; the same on every rank."""
        losses = []
        if self.world.rank == 0 and self._options.checked:
            batches = [list(range(self.ranks))]
            with self._team(ALONE, batches, 0, ranks=1, threads=self._options.ranks) as team:
                losses = team.ask("train", steps=self._options.checked)[0]
        return list(self.world.exchange(losses)[0])

    def _of_all(self, answers: list[Any]) -> list[Any]:
        """Return the answers of all ranks of a contender, from all processes."""
        return [answer for told in self.world.exchange(answers) for answer in told]

    def _look(self, name: str) -> dict[str, Any]:
        """Return the maximum over ranks of each inspected value."""
        looks = self._of_all(self.teams[name].ask("look", steps=2))
        worst = dict(looks[0])
        for key in ("base_bytes", "peak_bytes", "shared_bytes", "page_faults", "made_s"):
            worst[key] = max(look[key] for look in looks)
        for key in ("parts_s", "spans_s", "disk_bytes"):
            worst[key] = {part: max(look[key].get(part, 0.0) for look in looks) for part in looks[0][key]}
        return worst

    def trace(self, name: str, path: Path) -> None:
        """Write two steps of every rank of a contender as a Chrome trace with a title."""
        told = self._of_all(self.teams[name].ask("trace", steps=2))
        if self.world.rank == 0:
            size = f"{self.ranks} ranks, {self.workload.precision}, batch {self.workload.batch} a rank"
            write_trace(path, told, title=f"One training step of {name}: {size}.")

    def _team(
        self,
        entry: ComparisonEntry,
        batches: list[list[int]],
        place: int,
        *,
        ranks: int | None = None,
        threads: int | None = None,
    ) -> Team:
        variables = {
            **entry.variables,
            "PYTHONPATH": os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH")))),
        }
        if self.launched and ranks is None:
            # The launcher's variables, except for the rendezvous, which is separate for each contender.
            port = int(os.environ["MASTER_PORT"]) + 1 + place
            variables |= {key: os.environ[key] for key in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")}
            variables |= {"MASTER_ADDR": os.environ["MASTER_ADDR"], "MASTER_PORT": str(port)}
            variables |= {"TORCHELASTIC_USE_AGENT_STORE": "False"}
            ranks = 1
        command = python_worker("benchmarks.step.work", entry.python)
        return Team(
            entry.name,
            command if entry.group is None else entry.group.command(command),
            self.ranks if ranks is None else ranks,
            options={"contender": entry.contender, "batches": batches, "workload": asdict(self.workload)},
            threads=threads or self._options.threads,
            variables=variables,
            start_s=600.0,
        )

    def _greatest(self, values: list[float]) -> list[float]:
        return [max(column) for column in zip(*self.world.exchange(values), strict=True)]


def write_trace(path: Path, told: Sequence[Sequence[dict[str, Any]]], **facts: Any) -> None:
    """Write the ranks' events as a Chrome trace, one line per event, with ``facts`` and the machine's."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with observe.recording(observe.ChromeTrace(path)):
        for event in (event for events in told for event in events):
            kind = observe.Span if "end_s" in event else observe.Count if "value" in event else observe.Instant
            observe.emit(kind(**event))
    facts["machine"] = machine_fingerprint()
    rows = ",\n".join(json.dumps(row) for row in json.loads(path.read_text("utf-8"))["traceEvents"])
    path.write_text(f'{{"otherData": {json.dumps(facts)},\n"traceEvents": [\n{rows}\n]}}\n', "utf-8")


def add_beyond_plan(values: dict[str, dict[str, Any]]) -> None:
    """Add to each contender with a plan the relative memory beyond it.

    ``activations_bytes`` is the peak of compute only beyond its parameters, with each gradient dropped at once: the
    memory of forward and backward themselves.
    """
    compute = values[BASELINE]
    activations = compute["peak_bytes"] - compute["base_bytes"] - compute["plan_bytes"]
    for name, looked in values.items():
        looked["activations_bytes"] = activations
        if looked["plan_bytes"] and name != BASELINE:
            held = looked["peak_bytes"] - looked["base_bytes"] - activations
            looked["beyond_plan"] = held / looked["plan_bytes"] - 1


def run_comparison(
    suite: str,
    entries: Sequence[ComparisonEntry],
    options: argparse.Namespace,
    *,
    trace: Path | None = None,
    missing: Mapping[str, str] | None = None,
    parameters: Mapping[str, Any] | None = None,
) -> Record:
    """Run a comparison, print its table on rank 0, and write the record to ``--out``.

    Args:
        trace: path for a Chrome trace of the last contender.
        missing: contenders that cannot take part, with reasons.
        parameters: further facts for the record.
    """
    comparison = ContenderTeams(entries, options, missing or {})
    workload = comparison.workload
    name = f"{suite}/{workload.precision}-batch{workload.batch}"
    record = Record.begin(suite, format_command(), machine_fingerprint())
    with ExitStack() as stack:
        comparison.start(stack)
        result = comparison.measure(name, f"training step, {workload.precision}, batch {workload.batch} a rank")
        if trace is not None:
            comparison.trace(entries[-1].name, trace)
    result.parameters |= parameters or {}
    record.results.append(result)
    if comparison.world.rank == 0:
        print(comparison_table(result))
        if options.out is not None:
            record.write(options.out)
    return record


def comparison_table(result: Result) -> str:
    """Return the results as a table, for people."""
    parameters = result.parameters
    tokens = parameters["ranks"] * parameters["batch"] * parameters["sequence"]
    compute_s = statistics.median(result.seconds[BASELINE])
    lines = [
        f"{result.title}; {parameters['ranks']} ranks x {parameters['threads']} threads",
        f"{len(result.seconds[BASELINE])} rounds; {result.checked}",
        "time: over compute only's in the same round, median and MAD; tokens/s: compute only's over that;",
        "memory: peak beyond what the process held before the model was made, MB a rank",
        f"{'':22}{'time':>7} {'MAD':>6} {'tokens/s':>9} {'memory':>7} {'plan':>6} {'beyond':>7} {'faults':>7}"
        "  ms of forward, backward, update; waits and other spans",
    ]
    for name in result.seconds:
        time, values = result.slowdown(name), result.values[name]
        parts = " ".join(f"{values['parts_s'][part] * 1e3:.0f}" for part in ("forward", "backward", "update"))
        spans = ", ".join(f"{span} {value * 1e3:.1f}" for span, value in values["spans_s"].items())
        plan = f"{values['plan_bytes'] / 1e6:.1f}" if values["plan_bytes"] else ""
        beyond = f"{values['beyond_plan']:+.1%}" if "beyond_plan" in values else ""
        lines.append(
            f"{name:22}{time.median:7.3f} {time.mad:6.3f} {tokens / compute_s / time.median:9.0f}"
            f" {(values['peak_bytes'] - values['base_bytes']) / 1e6:7.1f} {plan:>6} {beyond:>7}"
            f" {values['page_faults']:7.0f}  {parts}; {spans}"
        )
    lines += [f"{name:22}is missing: {reason}" for name, reason in parameters["missing"].items()]
    return "\n".join(lines)
