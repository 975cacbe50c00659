"""Sustained rates of a machine's devices and links, measured into a Cluster for the planner.

All probes take turns in rounds, as contenders of one benchmark (see harness.py), each on all ranks at once. Without a
launcher, a CPU uses two ranks of this host and an accelerator one rank per device; under a launcher, its ranks.

From seconds to numbers:

    flops           the fastest square matrix product, by dtype
    memory          bytes that an update of a flat shard reads and writes, over its seconds
    paces           from a small decoder: FLOP/s of its products, forward and backward, over the peak; their ramp: time
        for few tokens beyond the proportional share of many; and bytes moved by passes other than products, over the
        seconds they take in addition to products
    links           latency: seconds of a short collective over its rounds; bandwidth: bytes of a long collective over
        its remaining seconds
    contention      extra time of compute and collectives together beyond the longer of the two, over the shorter
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch

from npuzero import config
from npuzero import device as devices
from npuzero.bench.harness import Benchmark, Combine, Contender, Effort, Result
from npuzero.bench.harness import run_benchmark as run_rounds
from npuzero.bench.machine import machine_fingerprint
from npuzero.bench.spread import median
from npuzero.bench.suites.disk import measure_disk_speeds
from npuzero.bench.suites.probes import VERBS, ProbeRank
from npuzero.bench.team import Team, python_worker
from npuzero.planner.hardware.cluster import Cluster, DevicePace, DeviceSpec, LinkSpec

SUITE = "cluster"
#: Ranks on a CPU without a launcher.
RANKS = 2

Say = Callable[[str], None]
Facts = Mapping[str, Mapping[str, float]]


def cluster_effort(quick: bool) -> Effort:
    """Return the duration of the measurement: about a minute and a half, or seconds if ``quick``."""
    if quick:
        return Effort(least_rounds=2, most_rounds=3, most_s=2.0, error=0.05, visit_s=0.002, warm_up=1)
    return Effort(least_rounds=5, most_rounds=30, most_s=75.0, error=0.01, visit_s=0.15, warm_up=2)


@dataclass(frozen=True)
class ProbeCrew:
    """Represent the ranks that run the probes, as seen by the process that drives them.

    Attributes:
        visit: returns seconds per call of a probe, by name and number of calls.
        facts: FLOPs, bytes, tokens or messages of one call, by probe.
        place: description of devices and hosts.
        combine: over the driving processes.
    """

    visit: Callable[[str, int], float]
    facts: Facts
    place: Mapping[str, Any]
    combine: Combine = lambda values: values

    def contenders(self, say: Say = lambda text: None) -> list[Contender]:
        """Return a contender for each probe; ``say`` reports its first measurement."""
        told: set[str] = set()

        def visit(name: str, count: int) -> float:
            seconds = self.visit(name, count)
            if name not in told:
                told.add(name)
                say(f"{name}: about {seconds * 1e3:.3g} ms")
            return seconds

        return [
            Contender(name, functools.partial(visit, name), values=dict(facts)) for name, facts in self.facts.items()
        ]


@contextmanager
def open_probe_crew(device: torch.device, quick: bool = False) -> Iterator[ProbeCrew]:
    """Provide the ranks that run the probes: the launcher's, or those of a team on this host.

    Raises:
        BenchmarkError: a rank could not be started, or failed.
    """
    if config.read_launch().world_size > 1:
        probes = ProbeRank(device, quick)

        def slowest(values: list[float]) -> list[float]:
            return [max(each) for each in zip(*probes.world.exchange(values), strict=True)]

        try:
            yield ProbeCrew(probes.visit, probes.facts(), probes.place(), slowest)
        finally:
            probes.close()
        return
    cores = len(os.sched_getaffinity(0))
    ranks = min(RANKS, cores) if device.type == "cpu" else devices.get(device).count()
    team = Team(
        "probes",
        python_worker("npuzero.bench.suites.probes"),
        ranks,
        options={"device": device.type, "quick": quick},
        threads=max(1, cores // ranks),
    )
    with team:
        yield ProbeCrew(
            lambda name, count: max(team.ask("visit", name=name, count=count)),
            team.ask("facts")[0],
            team.ask("place")[0],
        )


def measure_cluster(
    device: torch.device, *, quick: bool = False, folders: Sequence[Path] = (), say: Say = lambda text: None
) -> tuple[Result, Cluster]:
    """Measure the probes; return their result and the cluster derived from it.

    Args:
        quick: a smoke run of a few seconds.
        folders: on the disks of a node that hold offloaded state; (): skip disks.
        say: receives progress messages.

    Raises:
        BenchmarkError: a rank could not be started, or failed.
        ConfigError, OutOfSpace, StorageError: for a folder, as :func:`npuzero.bench.suites.disk.measure_disk_speeds`.

    Example::

        result, cluster = measure_cluster(torch.device("cpu"))
        cluster.write("cluster.json")
    """
    with open_probe_crew(device, quick) as ranks:
        contenders = ranks.contenders(say)
        baseline = next(name for name in ranks.facts if name.startswith("passes"))
        benchmark = Benchmark(
            SUITE, "what this machine sustains", contenders, baseline, lambda: "returns", {"place": dict(ranks.place)}
        )
        result = run_rounds(benchmark, cluster_effort(quick), combine=ranks.combine)
        say(f"{len(result.seconds[baseline])} rounds")
        place = ranks.place
    disks = _measure_disks(folders, place["local"], quick, say) if folders else {}
    return result, build_cluster(result.seconds, result.values, place, disks, describe_measurement(device))


def build_cluster(
    seconds: Mapping[str, Sequence[float]],
    facts: Facts,
    place: Mapping[str, Any],
    disks: Mapping[str, LinkSpec] | None = None,
    source: str = "measured by npuzero bench cluster",
) -> Cluster:
    """Build the cluster from the probes' times.

    Args:
        seconds: per call, one value per round, by probe.
        facts: FLOPs, bytes, tokens or messages of one call, by probe.
        place: devices and hosts, from :meth:`~npuzero.bench.suites.probes.ProbeRank.place`.
        disks: links to disks, if measured.
        source: recorded for each number.
    """
    took = {name: median(values) for name, values in seconds.items()}
    kind, local, ranks = place["kind"], place["local"], place["ranks"]
    links = {
        level: _build_link(took, facts, level) for level in ("local", "node") if f"{level}/all_reduce/long" in took
    }
    links["host"] = LinkSpec(_round_four_digits(_probe_bandwidth(took, facts, "host/to_device", "host/to_host")))
    host_bytes = place["host_bytes"] // local
    cluster = Cluster(
        name=f"{kind} measured",
        device=_build_device(took, facts, host_bytes if kind == "cpu" else place["memory_bytes"]),
        links={**links, **(disks or {})},
        local=local,
        ranks=ranks,
        host_memory_bytes=host_bytes,
        contention=_round_four_digits(_measure_contention(seconds)) if "beside/both" in seconds else 0.0,
    )
    return replace(cluster, sources=_number_sources(cluster, source))


def _number_sources(cluster: Cluster, source: str) -> dict[str, str]:
    """Return the source of each number, by its path."""
    device = cluster.device
    paths = [f"device.flops.{dtype}" for dtype in device.flops]
    paths += [f"device.{name}" for name in ("sustained", "memory_bytes", "memory_bytes_per_s")]
    paths += [f"device.paces.{dtype}.{name}" for dtype, pace in device.paces.items() for name in vars(pace)]
    paths += [f"links.{level}.{name}" for level, link in cluster.links.items() for name, at in vars(link).items() if at]
    return dict.fromkeys([*paths, "local", "host_memory_bytes", "contention"], source)


def _build_device(took: Mapping[str, float], facts: Facts, memory_bytes: int) -> DeviceSpec:
    dtypes = list(dict.fromkeys(name.split("/")[1] for name in took if name.startswith("large/")))
    peaks = {dtype: max(_probe_flops(took, facts, f"large/{dtype}/")) for dtype in dtypes}
    # By definition training's products do not exceed the peak; on an unsteady clock they may, so take the maximum.
    peaks = {
        dtype: _round_four_digits(max(peak, *_probe_flops(took, facts, f"products/{dtype}/")))
        for dtype, peak in peaks.items()
    }
    paces = {dtype: _build_pace(took, facts, dtype, peak) for dtype, peak in peaks.items()}
    return DeviceSpec(
        peaks,
        paces[dtypes[0]].sustained,
        memory_bytes,
        _round_four_digits(_probe_bandwidth(took, facts, "update")),
        paces,
    )


def _build_pace(took: Mapping[str, float], facts: Facts, dtype: str, peak: float) -> DevicePace:
    """Return the pace of training in a dtype.

    The products' seconds for two numbers of tokens define a straight line: its slope is the rate for many tokens, and
    its value at zero tokens is the ramp.
    """
    batches = sorted((facts[name]["tokens"], name) for name in took if name.startswith(f"products/{dtype}/"))
    (few, less), (many, more) = batches[0], batches[-1]
    slope = (took[more] - took[less]) / (many - few) if many > few else took[more] / many
    # A slope above the mean of many tokens, or below half of it, can only come from an unsteady clock.
    mean = took[more] / many
    slope = min(mean, max(slope, mean / 2))
    ramp = sum(took[name] - tokens * slope for tokens, name in batches) / len(batches) / slope
    rate = facts[more]["flops"] / many / slope
    beyond_s = sum(took[name.replace("products", "passes")] - took[name] for _, name in batches)
    all_s = sum(took[name.replace("products", "passes")] for _, name in batches)
    nbytes = sum(facts[name]["nbytes"] for _, name in batches)
    return DevicePace(
        _round_four_digits(min(1.0, rate / peak)),
        _round_four_digits(max(0.0, ramp)),
        _round_four_digits(nbytes / max(beyond_s, 0.01 * all_s)),
    )


def _probe_flops(took: Mapping[str, float], facts: Facts, prefix: str) -> list[float]:
    """Return the FLOP/s of the probes with this name prefix."""
    return [facts[name]["flops"] / seconds for name, seconds in took.items() if name.startswith(prefix)]


def _probe_bandwidth(took: Mapping[str, float], facts: Facts, *names: str) -> float:
    """Return the bytes per second of these probes together."""
    return sum(facts[name]["nbytes"] for name in names) / sum(took[name] for name in names)


def _build_link(took: Mapping[str, float], facts: Facts, level: str) -> LinkSpec:
    """Return a level's latency from its short collectives, and its bandwidth from its long ones."""
    short, long = ([f"{level}/{verb}/{size}" for verb in VERBS] for size in ("short", "long"))
    latency_s = sum(took[name] for name in short) / sum(facts[name]["messages"] for name in short)
    # Count at least half of a long collective as bandwidth: otherwise a message was late by chance.
    beyond_s = sum(max(took[name] - facts[name]["messages"] * latency_s, took[name] / 2) for name in long)
    return LinkSpec(
        _round_four_digits(sum(facts[name]["nbytes"] for name in long) / beyond_s), _round_four_digits(latency_s)
    )


def _measure_contention(seconds: Mapping[str, Sequence[float]]) -> float:
    """Return the extra time of compute and traffic together beyond the longer of the two, as a part of the shorter."""
    rounds = zip(*(seconds[f"beside/{what}"] for what in ("compute", "traffic", "both")), strict=True)
    return min(1.0, max(0.0, median([(both - max(alone)) / min(alone) for *alone, both in rounds])))


def _measure_disks(folders: Sequence[Path], local: int, quick: bool, say: Say) -> dict[str, LinkSpec]:
    """Return a rank's share of its node's disks. The ranks of a launcher measure simultaneously, each its own share."""
    settings = config.Settings()
    effort: dict[str, Any] = {"seconds": 0.1, "nbytes": 1 << 27} if quick else {"seconds": 4.0, "nbytes": 4 << 30}
    found = measure_disk_speeds(folders, threads=settings.io_threads, verify=settings.verify, say=say, **effort)
    ranks = 1 if config.read_launch().world_size > 1 else local
    return {f"disk_{way}": LinkSpec(_round_four_digits(found.gbs[way] * 1e9 / ranks)) for way in ("read", "write")}


def describe_measurement(device: torch.device) -> str:
    """Return the source of each number: device, software and date."""
    facts = machine_fingerprint(device)
    day = datetime.now(timezone.utc).date().isoformat()
    return f"measured by npuzero bench cluster, {facts['device'].partition(',')[0]}, torch {facts['torch']}, {day}"


def _round_four_digits(value: float) -> float:
    """Round to four digits."""
    return float(f"{value:.4g}")
