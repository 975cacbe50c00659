"""A training step between two nodes of two ranks over a slow link, by plan and by rate. From the repository's root::

    python -m benchmarks.wires --out runs/bench/wires-namespaces.json            # root; about 6 minutes on two cores
    python -m benchmarks.wires --links shared --out runs/bench/wires-shared.json # without root; about 3 minutes
    python -m benchmarks.wires --peers deepspeed-3 --rates 1 --rounds 3
    python -m benchmarks.wires.picture benchmarks/results/wires-*.json --out docs/wires.png

The demo's GPT with 25.4 M parameters in bf16, with batches so small that the link dominates. All ranks are processes of
this machine. ``--links namespaces``: a node is a network namespace; the two are connected by a wire behind token
buckets (namespaces.py); npuzero communicates over gloo, as does DeepSpeed, with its stage 3, hpZ and ZeRO++ if they
run. ``--links shared``: npuzero's shared memory; traffic between nodes waits for simulated links (links.py). Goals at 1
Gbit/s: ``thin`` at least twice as fast as ``hpz``, and four times as fast as ``zero3``.

Losses of the first steps are compared with plain torch's. Bytes between nodes per step are those counted by the plan
(``planned``, of the node that sends most) and those carried by the link (``carried``, the larger direction).
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import asdict
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from benchmarks.peers.environments import DEEPSPEED, NotInstalled
from benchmarks.step.compare import BANDS, ROOT
from benchmarks.wires import work
from benchmarks.wires.links import SharedLinks
from benchmarks.wires.namespaces import WiredNodes, lay_wire
from benchmarks.wires.work import EACH, PEERS, PLANS, RANKS, DemoWorkload
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
from npuzero.cli.output.table import format_table
from npuzero.errors import BenchmarkError

SHARED, NAMESPACES = "shared", "namespaces"
UNLIMITED = "unlimited"
RATES = ("unlimited", "10", "1", "0.1")
#: Required speedups of thin at the judged rate, which is measured longer.
GOALS = {"hpz": 2.0, "zero3": 4.0}
JUDGED, LONGER = "1", 2.5
#: Allowed difference of a loss from plain torch's if codes are sent.
CODED_BAND = 0.05
Link = WiredNodes | SharedLinks


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    DemoWorkload.add_options(parser)
    parser.add_argument("--links", choices=(NAMESPACES, SHARED), default=NAMESPACES)
    parser.add_argument("--plans", type=_split_words, default=PLANS, help="with commas")
    parser.add_argument("--peers", type=_split_words, default=PEERS, help="with commas; of namespaces alone")
    parser.add_argument("--pip", type=str.split, default=[], help="further arguments of pip install")
    parser.add_argument("--rates", type=_split_words, default=RATES, help="Gbit/s, with commas")
    parser.add_argument("--rounds", type=int, default=9, help="at each rate, at the most")
    parser.add_argument("--seconds", type=float, default=30.0, help="of rounds at each rate, after which none begins")
    parser.add_argument("--checked", type=int, default=2, help="steps whose losses are compared with plain torch's")
    parser.add_argument("--out", type=Path, help="write the record there (JSON)")
    options = parser.parse_args(arguments)
    record = Record.begin("wires", format_command(), machine_fingerprint())
    with ExitStack() as stack:
        comparison = WireComparison(options, stack.enter_context(make_links(options.links)))
        comparison.start(stack)
        for rate in options.rates:
            record.results.append(comparison.measure(rate))
    print(format_results(record.results))
    if options.out is not None:
        record.write(options.out)


def make_links(kind: str) -> AbstractContextManager[Link]:
    """Return the links of that kind, for the block."""
    return lay_wire(EACH) if kind == NAMESPACES else _shared_links()


class WireComparison:
    """The teams of a comparison, all alive at the same time, between nodes connected by ``link``."""

    def __init__(self, options: argparse.Namespace, link: Link) -> None:
        self._options = options
        self._link = link
        self._sizes = DemoWorkload.of(options)
        self._teams: dict[str, Team] = {}
        self._sent: dict[str, dict[str, Any]] = {}
        self._missing: dict[str, str] = {}

    def start(self, stack: ExitStack) -> None:
        """Start and check every contender and count its traffic; a failing peer is missing, with the reason."""
        wanted = self._plain_losses()
        self._checked = f"losses of {len(wanted)} steps beside plain torch's: {', '.join(f'{x:.4f}' for x in wanted)}"
        for name in self._options.plans:
            self._join(f"npuzero {name}", self._team(name), stack, wanted)
        for name in self._options.peers if isinstance(self._link, WiredNodes) else ():
            try:
                DEEPSPEED.ensure(self._options.pip)
                self._join(name, self._team(name, str(DEEPSPEED.python), DEEPSPEED.variables), stack, wanted)
            except NotInstalled as reason:
                self._missing[name] = str(reason)
            except BenchmarkError as error:
                self._missing[name] = f"{error.got} (expected: {error.expected})"

    def measure(self, rate: str) -> Result:
        """Time all contenders at a rate."""
        self._link.limit(None if rate == UNLIMITED else float(rate))
        options = self._options
        seconds = options.seconds * (LONGER if rate == JUDGED else 1)
        effort = Effort(min(5, options.rounds), options.rounds, seconds, warm_up=0)
        contenders = [team.contender() for team in self._teams.values()]
        for contender in contenders:
            contender.values.update(self._sent[contender.name])
        parameters = asdict(self._sizes) | {"links": options.links, "ranks": RANKS, "nodes": RANKS // EACH}
        parameters |= {"gbit_per_s": None if rate == UNLIMITED else float(rate), "missing": self._missing}
        precision = self._sizes.precision
        title = f"step between 2 nodes of {EACH} ranks, {precision}, {options.links}, {rate} Gbit/s"
        name = f"wires/{options.links}/{precision}/{rate}"
        benchmark = Benchmark(name, title, contenders, contenders[0].name, lambda: self._checked, parameters)
        return run_benchmark(benchmark, effort)

    def _join(self, name: str, team: Team, stack: ExitStack, wanted: list[float]) -> None:
        print(f"starting {name}", file=sys.stderr, flush=True)
        own = ExitStack()
        with own:
            own.enter_context(team)
            losses = [statistics.fmean(values) for values in zip(*team.ask("train", steps=len(wanted)), strict=True)]
            band = CODED_BAND if name.endswith(("thin", "++")) else BANDS[self._sizes.precision]
            if not all(abs(loss - want) <= band for loss, want in zip(losses, wanted, strict=True)):
                raise BenchmarkError(
                    f"losses of {name}",
                    expected=f"within {band} of {wanted}",
                    got=str(losses),
                    do="No figure is taken of a contender that learns something else: correct it.",
                )
            self._sent[name] = self._count(team, own=name not in PEERS)
            stack.push(own.pop_all())
        self._teams[name] = team

    def _count(self, team: Team, own: bool) -> dict[str, Any]:
        before, steps = self._link.carried(), 2
        team.ask("train", steps=steps)
        sent = {"carried_bytes": (self._link.carried() - before) / steps}
        if own:
            crossed = team.ask("crossed")
            sent["planned_bytes"] = max(sum(crossed[begin : begin + EACH]) for begin in range(0, RANKS, EACH))
        return sent

    def _plain_losses(self) -> list[float]:
        """Return plain torch's losses, with one process taking the batches of all ranks."""
        if not self._options.checked:
            return []
        with self._team("plain", batches=[list(range(RANKS))], threads=2, linked=False) as team:
            return list(team.ask("train", steps=self._options.checked)[0])

    def _team(
        self,
        contender: str,
        python: str = sys.executable,
        variables: Mapping[str, str] | None = None,
        batches: list[list[int]] | None = None,
        threads: int = 1,
        linked: bool = True,
    ) -> Team:
        batches = batches or [[rank] for rank in range(RANKS)]
        command = python_worker(work.__name__, python)
        name = contender if contender not in PLANS else f"npuzero {contender}"
        return Team(
            name,
            self._link.command(command) if linked else command,
            len(batches),
            options={"contender": f"{work.__name__}:{contender}", "batches": batches, "workload": asdict(self._sizes)},
            threads=threads,
            variables={"PYTHONPATH": str(ROOT), **(self._link.variables if linked else {}), **(variables or {})},
            timeout_s=300.0,
            start_s=600.0,
        )


def format_results(results: Sequence[Result]) -> str:
    """Return seconds by rate, bytes, goals, and missing contenders with reasons, for people."""
    last = results[-1]
    rates = [_rate_name(result) for result in results]
    lines = []
    for name in last.seconds:
        medians = [f"{statistics.median(result.seconds[name]):.3f}" for result in results]
        sent = last.values[name]
        counted = [f"{sent[key] / 1e6:.1f}" if key in sent else "" for key in ("planned_bytes", "carried_bytes")]
        lines.append([name, *medians, *counted])
    text = [format_table([last.title.rpartition(", ")[0], *rates, "MB planned", "carried"], lines), last.checked]
    for result in results:
        # Ratios are printed at every rate; the goal only applies at the judged one.
        for other, goal in GOALS.items():
            own, against = "npuzero thin", f"npuzero {other}"
            if {own, against} <= result.seconds.keys():
                fast = result.speedup(own, against)
                wanted = f", goal {goal}" if _rate_name(result) == JUDGED else ""
                text.append(f"thin beside {other} at {_rate_name(result)}: {fast.median:.2f} times as fast{wanted}")
    text += [f"{name} is missing: {reason}" for name, reason in last.parameters["missing"].items()]
    return "\n".join(text)


def _rate_name(result: Result) -> str:
    return result.name.rpartition("/")[2]


def _split_words(text: str) -> tuple[str, ...]:
    return tuple(filter(None, text.split(",")))


@contextmanager
def _shared_links() -> Any:
    with TemporaryDirectory() as folder:
        yield SharedLinks(Path(folder) / "links", RANKS // EACH)


if __name__ == "__main__":
    main()
