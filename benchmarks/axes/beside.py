"""Comparisons of contenders with ranks that share batches: start, check, time in rounds and inspect them."""

from __future__ import annotations

import argparse
import os
import statistics
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path

from benchmarks.axes.llama import LlamaSizes
from benchmarks.step.compare import BANDS, ROOT
from npuzero.bench import Benchmark, Effort, Result, Team, python_worker, run_benchmark
from npuzero.errors import BenchmarkError


@dataclass(frozen=True)
class AxisContender:
    """A contender and its workload.

    Attributes:
        name: for people.
        contender: an entry of the CONTENDERS of ``work``.
        sizes: of its model and batches.
        shared: number of ranks that compute one batch together.
        apart: ranks of a batch are strided over the world instead of adjacent.
        learns: it trains the model, so that its losses can be checked.
        work: the module that makes its ranks.
    """

    name: str
    contender: str
    sizes: LlamaSizes
    shared: int
    apart: bool = False
    learns: bool = True
    work: str = "benchmarks.axes.work"

    def batch(self, rank: int, ranks: int) -> int:
        """Return the batch of ``rank`` among ``ranks``."""
        return rank % (ranks // self.shared) if self.apart else rank // self.shared

    def team(self, batches: list[list[int]], contender: str = "", threads: int = 1) -> Team:
        """Return a team of ranks with these batches, of this contender or another."""
        path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
        named = f"{self.work}:{contender or self.contender}"
        return Team(
            contender or self.name,
            python_worker(self.work),
            len(batches),
            options={"contender": named, "batches": batches, "workload": asdict(self.sizes)},
            threads=threads,
            variables={"PYTHONPATH": path},
            start_s=600.0,
        )


def ask_nothing(teams: Mapping[str, Team], result: Result) -> None:
    """Ask for no further facts."""


def add_axis_comparison_options(parser: argparse.ArgumentParser, sizes: type[LlamaSizes] = LlamaSizes) -> None:
    """Add the options of every comparison, including the fields of ``sizes``."""
    sizes.add_options(parser)
    parser.add_argument("--ranks", type=int, default=2, help="each a process with one thread")
    parser.add_argument("--rounds", type=int, default=15, help="at the most")
    parser.add_argument("--seconds", type=float, default=120.0, help="of rounds, at the most")
    parser.add_argument("--visit", type=float, default=0.5, help="seconds of a contender in a round, at the least")
    parser.add_argument("--checked", type=int, default=2, help="steps whose losses are compared with plain torch's")
    parser.add_argument("--out", type=Path, help="write the record there (JSON)")


def measure_sides(
    name: str,
    title: str,
    sides: Sequence[AxisContender],
    options: argparse.Namespace,
    also: Callable[[Mapping[str, Team], Result], None] = ask_nothing,
) -> Result:
    """Return the times and memory of all sides; the first is the baseline.

    Args:
        also: called last with the teams by name, and the result.

    Raises:
        BenchmarkError: a side does not start, or its losses differ from plain torch's.
    """
    wanted: dict[tuple[LlamaSizes, int], list[float]] = {}
    for side in sides:
        if side.learns and (side.sizes, side.shared) not in wanted:
            wanted[side.sizes, side.shared] = reference_losses(side, options)
    # All teams live for the full measurement: rounds interleave them, and `also` may ask each again.
    with ExitStack() as stack:
        teams = {}
        for side in sides:
            print(f"starting {side.name}", flush=True)
            batches = [[side.batch(rank, options.ranks)] for rank in range(options.ranks)]
            teams[side.name] = stack.enter_context(side.team(batches))

        def check() -> str:
            those = [side for side in sides if side.learns]
            return "; ".join(_check_losses(side, teams[side.name], wanted[side.sizes, side.shared]) for side in those)

        parameters = {"ranks": options.ranks, "sides": {side.name: asdict(side.sizes) for side in sides}}
        contenders = [team.contender() for team in teams.values()]
        effort = Effort(min(5, options.rounds), options.rounds, options.seconds, visit_s=options.visit, warm_up=1)
        benchmark = Benchmark(name, title, contenders, sides[0].name, check, parameters)
        result = run_benchmark(benchmark, effort)
        for side in sides:
            looks = teams[side.name].ask("look", steps=1)
            held = [look["peak_bytes"] - look["base_bytes"] for look in looks]
            parts = {part: max(look["parts_s"][part] for look in looks) for part in looks[0]["parts_s"]}
            result.values[side.name].update(held_bytes=max(held), parts_s=parts)
        also(teams, result)
    return result


def format_sides(result: Result) -> str:
    """Format times relative to the baseline, and memory, for people."""
    lines = [f"{result.title}: {len(result.seconds[result.baseline])} rounds; {result.checked}"]
    for name, seconds in result.seconds.items():
        slow, held = result.slowdown(name), result.values[name]["held_bytes"] / 1e6
        parts = ", ".join(f"{part} {value * 1e3:.0f}" for part, value in result.values[name]["parts_s"].items())
        own_ms = statistics.median(seconds) * 1e3
        lines.append(f"{name:24}{slow.median:7.3f} MAD {slow.mad:.3f} {own_ms:8.0f} ms {held:8.1f} MB; ms of {parts}")
    return "\n".join(lines)


def format_time_and_memory(result: Result, own: str, others: Sequence[str], goal: float) -> str:
    """Time and memory of ``own`` relative to each of ``others``, with the goals, for people."""
    lines = []
    for other in others:
        held = result.values[own]["held_bytes"] / result.values[other]["held_bytes"]
        slow = result.slowdown(own, other).median
        lines.append(f"beside {other}: time {slow:.3f}, goal {goal}; memory {held:.3f}, goal 1")
    return "\n".join(lines)


def reference_losses(side: AxisContender, options: argparse.Namespace) -> list[float]:
    """Return plain torch's losses, with one process taking the batches of all ranks."""
    batches = [list(range(options.ranks // side.shared))]
    print(f"plain torch, as {side.name} is to learn", flush=True)
    with side.team(batches, "plain", threads=2) as team:
        losses: list[float] = team.ask("train", steps=options.checked)[0]
    return losses


def _check_losses(side: AxisContender, team: Team, wanted: list[float]) -> str:
    by_rank = team.ask("train", steps=len(wanted))
    losses = [statistics.fmean(values) for values in zip(*by_rank, strict=True)]
    band = BANDS[side.sizes.precision]
    if not all(abs(loss - want) <= band for loss, want in zip(losses, wanted, strict=True)):
        raise BenchmarkError(
            f"losses of {side.name}",
            expected=f"within {band} of {wanted}",
            got=str(losses),
            do="No figure is taken of a contender that learns something else: correct it.",
        )
    return f"losses of {side.name} within {band} of plain torch's: {', '.join(f'{loss:.4f}' for loss in wanted)}"
