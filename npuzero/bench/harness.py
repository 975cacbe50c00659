"""Contenders measured in interleaved rounds.

A round visits every contender once, in a random order fixed by the seed. A visit makes as many calls as take about
``Effort.visit_s``. Contenders are compared by ratios within a round, because machines change their speed between
rounds; the reported value is the median over the rounds. Rounds continue until the medians are precise enough or a
limit is reached.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from npuzero import device as devices
from npuzero.bench.spread import Summary, median, per_round, summarize
from npuzero.errors import BenchmarkError

Clock = Callable[[], float]
Combine = Callable[[list[float]], list[float]]

_MOST_CALLS = 10_000  # per visit


@dataclass(frozen=True)
class Effort:
    """Define the duration of a measurement.

    Rounds end when every contender's ratio to the baseline has a median with a relative standard error below ``error``,
    but not before ``least_rounds``, and always after ``most_rounds`` or ``most_s`` seconds.
    """

    least_rounds: int = 9
    most_rounds: int = 99
    most_s: float = 15.0
    error: float = 0.004
    visit_s: float = 0.02
    warm_up: int = 2

    @classmethod
    def quick(cls) -> Effort:
        """Return the effort of a smoke run, which checks that everything works, not its speed."""
        return cls(least_rounds=3, most_rounds=5, most_s=0.5, error=0.05, visit_s=0.002, warm_up=1)


@dataclass
class Contender:
    """Represent one way to do the work.

    Attributes:
        visit: makes the given number of calls; returns seconds per call (with several ranks: the slowest rank's).
        nbytes: the least bytes one call must move by its contract; None if undefined.
        values: further JSON values for the record, such as peak memory; may be filled after the run.
    """

    name: str
    visit: Callable[[int], float]
    nbytes: int | None = None
    values: dict[str, Any] = field(default_factory=dict)


def local_contender(
    name: str,
    call: Callable[[], object],
    *,
    device: torch.device | str = "cpu",
    nbytes: int | None = None,
    prepare: Callable[[], object] | None = None,
    clock: Clock = time.perf_counter,
) -> Contender:
    """Make a contender in this process: ``call`` is timed, with the device synchronized at both ends.

    Args:
        prepare: called before each visit, outside the timing: a barrier, if ranks run together.
    """
    synchronize = devices.get(device).synchronize

    def visit(count: int) -> float:
        if prepare is not None:
            prepare()
        synchronize()
        begin = clock()
        for _ in range(count):
            call()
        synchronize()
        return (clock() - begin) / count

    return Contender(name, visit, nbytes)


@dataclass
class Benchmark:
    """Describe a benchmark: contenders that do the same work.

    Attributes:
        name: unique in its suite, such as ``"pack/400"``; figures refer to it.
        title: for people.
        contenders: the baseline and its competitors, and probes of the machine, such as a plain copy.
        baseline: name of the contender in the denominator of ratios.
        check: compares the contenders' results with the reference before timing; returns a description of the
            comparison.
        parameters: JSON values such as sizes, dtypes and ranks.
    """

    name: str
    title: str
    contenders: Sequence[Contender]
    baseline: str
    check: Callable[[], str]
    parameters: Mapping[str, Any] = field(default_factory=dict)


@dataclass
class Result:
    """Hold a benchmark's measurements: seconds per call by contender, one value per round."""

    name: str
    title: str
    baseline: str
    checked: str
    parameters: dict[str, Any]
    ended_by: str
    seconds: dict[str, list[float]]
    calls: dict[str, int]
    nbytes: dict[str, int | None]
    values: dict[str, dict[str, Any]]

    def speedup(self, contender: str, baseline: str | None = None) -> Summary:
        """Return the speedup of ``contender`` over ``baseline`` (default: the benchmark's), by rounds."""
        return summarize(per_round(self.seconds[baseline or self.baseline], self.seconds[contender]))

    def slowdown(self, contender: str, baseline: str | None = None) -> Summary:
        """Return the time of ``contender`` divided by that of ``baseline``, by rounds."""
        return summarize(per_round(self.seconds[contender], self.seconds[baseline or self.baseline]))

    def share(self, contender: str, probe: str) -> Summary:
        """Return bytes per second as a share of those of ``probe``, by rounds.

        Raises:
            BenchmarkError: one of the two has no bytes.
        """
        own, other = self.nbytes[contender], self.nbytes[probe]
        if own is None or other is None:
            raise BenchmarkError(
                f"benchmark {self.name!r}", expected=f"bytes of {contender!r} and {probe!r}", got="none",
                do="Give nbytes to both contenders.",
            )  # fmt: skip
        ratios = per_round(self.seconds[probe], self.seconds[contender])
        return summarize([ratio * own / other for ratio in ratios])

    def gb_per_s(self, contender: str) -> float | None:
        """Return the median rate in 1e9 bytes per second."""
        nbytes = self.nbytes[contender]
        return None if nbytes is None else nbytes / median(self.seconds[contender]) / 1e9


def run_benchmark(
    benchmark: Benchmark,
    effort: Effort,
    *,
    combine: Combine = lambda values: values,
    clock: Clock = time.perf_counter,
    seed: int = 0,
) -> Result:
    """Check the contenders, then measure them.

    Args:
        combine: for ranks that run this together, the maximum of each value over ranks. The result is the same on every
            rank, so that all ranks make the same decisions.

    Raises:
        BenchmarkError: the check failed, or the baseline is not a contender.
    """
    contenders = {contender.name: contender for contender in benchmark.contenders}
    if benchmark.baseline not in contenders or len(contenders) != len(benchmark.contenders):
        raise BenchmarkError(
            f"benchmark {benchmark.name!r}",
            expected=f"contenders of different names, {benchmark.baseline!r} among them",
            got=", ".join(contender.name for contender in benchmark.contenders),
            do="Correct the benchmark.",
        )
    checked = benchmark.check()
    calls = _warm_up(benchmark.contenders, effort, combine)
    seconds: dict[str, list[float]] = {name: [] for name in contenders}
    begin, order, ended_by = clock(), random.Random(seed), ""
    while not ended_by:
        visited = {
            name: contenders[name].visit(calls[name]) for name in order.sample(list(contenders), len(contenders))
        }
        # Combine elapsed time together with the timings: all ranks must leave the loop in the same round.
        *times, passed_s = combine([*(visited[name] for name in contenders), clock() - begin])
        for values, value in zip(seconds.values(), times, strict=True):
            values.append(value)
        ended_by = reason_to_end(seconds, benchmark.baseline, passed_s, effort)
    return Result(
        benchmark.name,
        benchmark.title,
        benchmark.baseline,
        checked,
        dict(benchmark.parameters),
        ended_by,
        seconds,
        calls,
        {name: contender.nbytes for name, contender in contenders.items()},
        {name: contender.values for name, contender in contenders.items()},
    )


def _warm_up(contenders: Sequence[Contender], effort: Effort, combine: Combine) -> dict[str, int]:
    """Return the number of calls per visit of each contender; one without warm-up."""
    times = [effort.visit_s] * len(contenders)
    for _ in range(effort.warm_up):
        times = combine([contender.visit(1) for contender in contenders])
    return {
        contender.name: min(_MOST_CALLS, max(1, round(effort.visit_s / max(once_s, 1e-9))))
        for contender, once_s in zip(contenders, times, strict=True)
    }


def reason_to_end(seconds: Mapping[str, list[float]], baseline: str, passed_s: float, effort: Effort) -> str:
    """Return why no further round is needed: ``"spread"``, ``"rounds"`` or ``"time"``; ``""`` if one is."""
    rounds = len(seconds[baseline])
    if rounds >= effort.least_rounds:
        errors = [
            summarize(per_round(seconds[baseline], values)).error
            for name, values in seconds.items()
            if name != baseline
        ]
        if max(errors, default=0.0) <= effort.error:
            return "spread"
    if rounds >= effort.most_rounds:
        return "rounds"
    return "time" if passed_s >= effort.most_s else ""


def check_equal(what: str, got: torch.Tensor, want: torch.Tensor) -> None:
    """Raise BenchmarkError unless both have the same values."""
    check_close(what, got, want, tolerance=0.0)


def check_close(what: str, got: torch.Tensor, want: torch.Tensor, *, tolerance: float) -> None:
    """Raise BenchmarkError if they differ by more than ``tolerance`` times the largest magnitude of ``want``."""
    if got.shape != want.shape:
        raise BenchmarkError(
            f"check of {what}", expected=f"shape {tuple(want.shape)}", got=f"{tuple(got.shape)}", do=_NO_FIGURE
        )
    if not want.numel() or torch.equal(got.to(want.dtype), want):
        return
    wide = want.double()
    apart = (got.double() - wide).abs().max().item()
    allowed = tolerance * wide.abs().max().item()
    if not apart <= allowed:  # also true for NaN
        raise BenchmarkError(
            f"check of {what}", expected=f"the reference within {allowed:.3g}", got=f"{apart:.3g} apart", do=_NO_FIGURE
        )


_NO_FIGURE = "No figure is taken of a wrong result: correct the contender, or the check."
