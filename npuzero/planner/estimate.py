"""What one way to train takes: its bytes by memory, and its seconds."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch

from npuzero.config import Settings
from npuzero.errors import ConfigError
from npuzero.plan import MOMENT_BLOCK, OFFLOADS, PRECISIONS, Memory, MeshShape, Plan, Report
from npuzero.planner.clock import Clock, Timeline
from npuzero.planner.cluster import Cluster
from npuzero.planner.memory import activation_bytes, is_cpu, memory_of
from npuzero.planner.rates import dtype_of, elementwise_s, products_s
from npuzero.planner.run import Job, Run
from npuzero.planner.workload import Workload, workload


@dataclass(frozen=True)
class Estimate:
    """Say what one way to train takes.

    Attributes:
        job, run: what is trained where, and how.
        work: what the model's units compute and keep in a pass.
        timeline: one step of one rank; None: it was not timed.
    """

    job: Job = field(repr=False)
    run: Run
    work: Workload = field(repr=False)
    timeline: Timeline | None = field(default=None, repr=False)

    @cached_property
    def report(self) -> Report:
        """Return what :func:`npuzero.predict` says of the run: the bytes of a rank, activations apart."""
        return report_of(self.job, self.run)

    @cached_property
    def memory(self) -> dict[str, int]:
        """Return the most bytes of a rank by memory (``device``, ``host``, ``nvme``), activations included."""
        return memory_of(self.job, self.run, self.report, self.work)

    @property
    def tokens(self) -> int:
        """Return the tokens of a step, of all ranks together."""
        run = self.run
        return run.mesh.data * run.micro_batch * run.micro_batches * self.job.sequence

    @property
    def step_s(self) -> float:
        """Return the seconds of a step; infinity where it was not timed."""
        return math.inf if self.timeline is None else self.timeline.step_s

    @property
    def tokens_per_s(self) -> float:
        """Return the tokens a second of one device."""
        return self.tokens / self.step_s / self.job.cluster.ranks

    @property
    def bound(self) -> str:
        """Return what is busy longest in a step."""
        return "" if self.timeline is None else self.timeline.bound

    def over(self, spare: float = 0.0) -> dict[str, int]:
        """Return by memory the bytes that are too many, where a part ``spare`` of the device's stays free; 0 where it
        holds them.
        """
        limit = limits(self.job.cluster, spare)
        return {memory: max(0, nbytes - limit.get(memory, nbytes)) for memory, nbytes in self.memory.items()}

    def arguments(self) -> dict[str, Any]:
        """Return the keyword arguments of :func:`npuzero.zero` that train so.

        The program's own part are ``run.micro_batch`` sequences in each of ``run.micro_batches`` passes, and
        activation checkpointing of the blocks where ``run.recompute``.
        """
        settings = self.run.settings
        return _named(self.run.plan) | ({} if settings == Settings() else {"settings": settings})


def _named(plan: Plan) -> dict[str, Any]:
    """Return the names of which :func:`npuzero.zero` makes ``plan``; the plan itself, where none do."""
    size = {} if plan.local_size is None else {"local_size": plan.local_size}
    offload = next((each for each in OFFLOADS if plan.name.endswith(f"+{each}") and each != plan.name), None)
    name = plan.name if offload is None else plan.name.removesuffix(f"+{offload}")
    beside = size if offload is None else size | {"offload": offload}
    for precision in PRECISIONS:
        try:
            made = Plan.preset(name, precision=precision, local_size=plan.local_size)
        except ConfigError:  # a plan of the caller's own
            break
        if (made if offload is None else made.offloaded(offload)) == plan:
            return {"plan": name, "precision": precision, **beside}
    return {"plan": plan}


def report_of(job: Job, run: Run) -> Report:
    """Return the bytes that one rank holds and sends in a step."""
    return job.model.predict(run.plan, run.mesh, run.settings, micro_batches=run.micro_batches, clip=job.clip)


def limits(cluster: Cluster, spare: float = 0.0) -> dict[str, int]:
    """Return the bytes that a rank may have of each memory that has an end; of the device without a part ``spare``."""
    device = int(cluster.device.memory_bytes * (1 - spare))
    return {Memory.DEVICE.value: device, Memory.HOST.value: cluster.host_memory_bytes}


class Estimator:
    """Estimate runs of one job; what they have in common is worked out once.

    Attributes:
        looked, timed: of how many it was asked whether they fit, and how many have been timed.
    """

    def __init__(self, job: Job) -> None:
        self.job = job
        self.looked = self.timed = 0
        self._reports: dict[tuple[Plan, MeshShape, Settings, int], Report] = {}
        self._works: dict[tuple[int, torch.dtype], Workload] = {}
        self._clock = Clock(job)
        self._numels: Counter[tuple[torch.dtype, bool]] = Counter()
        for parameter in (each for unit in job.model.units for each in unit):
            self._numels[parameter.dtype, parameter.trainable] += parameter.shape.numel()

    def estimate(self, run: Run) -> Estimate:
        """Return a run, not timed."""
        return Estimate(self.job, run, self._work(run.micro_batch, run.plan.precision.parameter_of(torch.float32)))

    def fits(self, estimate: Estimate, spare: float) -> bool:
        """Tell whether each memory holds a run, with a part ``spare`` of the device's left over.

        What a prediction has at its highest, and activations at theirs, are together the most that there can be; what
        rests, and activations at their highest, the least. Where the limit is between them, the step is walked through.
        """
        self.looked += 1
        run, limit = estimate.run, limits(self.job.cluster, spare)
        if self._resting_bytes(run) > limit[Memory.DEVICE.value]:
            return False
        report = self._report(run)
        if report.memory[Memory.HOST.value] > limit[Memory.HOST.value]:
            return False
        most = report.memory[Memory.DEVICE.value] + activation_bytes(estimate.work, run.recompute)
        if most <= limit[Memory.DEVICE.value]:
            return True
        if self.least_bytes(estimate) > limit[Memory.DEVICE.value]:
            return False
        held = memory_of(self.job, run, report, estimate.work)
        return held[Memory.DEVICE.value] <= limit[Memory.DEVICE.value]

    def time(self, estimate: Estimate) -> Estimate:
        """Return the run with its timeline."""
        self.timed += 1
        return replace(estimate, timeline=self._clock.time(estimate.run, estimate.work))

    def _resting_bytes(self, run: Run) -> float:
        """Return what parameters and states take at least where they rest on the device: without any padding."""
        plan, precision = run.plan, run.plan.precision
        total = 0.0
        for (dtype, trainable), numel in self._numels.items():
            own = precision.parameter_of(dtype)
            total += 0 if plan.parameters.far else numel * own.itemsize / run.mesh.size(plan.parameters.axes)
            if trainable:
                near = (1 - plan.states.share) if plan.states.far else 1.0
                states = precision.master_bytes(own) + 2 * precision.moment_bytes(MOMENT_BLOCK) / MOMENT_BLOCK
                total += near * numel * states / run.mesh.size(plan.states.axes)
        return total

    def least_bytes(self, estimate: Estimate) -> int:
        """Return bytes that the device holds at least: what rests there, and activations at their highest."""
        parts = self._report(estimate.run).held[Memory.DEVICE]
        return parts["parameters"] + parts["states"] + activation_bytes(estimate.work, estimate.run.recompute)

    def least_s(self, estimate: Estimate) -> float:
        """Return seconds that a step takes at least: what its units compute, whatever is sent."""
        run, work, device = estimate.run, estimate.work, self.job.cluster.device
        dtype, tokens = dtype_of(run.plan), work.micro_batch * work.sequence
        again = work.units[1:] if run.recompute else ()
        flops = 3 * sum(unit.flops for unit in work.units) + sum(unit.flops for unit in again)
        nbytes = sum(unit.forward_bytes + unit.backward_bytes for unit in work.units)
        nbytes += sum(unit.forward_bytes for unit in again)
        return run.micro_batches * (products_s(device, flops, dtype, tokens) + elementwise_s(device, nbytes, dtype))

    def _report(self, run: Run) -> Report:
        """Return what a run holds: the same from the second micro-batch on, so that one of two serves for all."""
        few = min(run.micro_batches, 2)
        key = run.plan, run.mesh, run.settings, few
        if key not in self._reports:
            self._reports[key] = report_of(self.job, replace(run, micro_batches=few))
        return self._reports[key]

    def _work(self, sequences: int, dtype: torch.dtype) -> Workload:
        """Return the work of a pass. Of one sequence and of two it is counted; each further one adds as much as the
        second.
        """
        key = sequences, dtype
        if key not in self._works:
            job = self.job
            if sequences <= 2:
                cpu = is_cpu(job.cluster)
                work = workload(job.model, job.sequence, sequences, job.attention, dtype, cpu)
            else:
                work = _extended(self._work(1, dtype), self._work(2, dtype), sequences)
            self._works[key] = work
        return self._works[key]


def _extended(one: Workload, two: Workload, sequences: int) -> Workload:
    """Return the work of so many sequences by that of one and of two."""

    def line(first: Any, second: Any) -> Any:
        """Return a record of numbers, each on the line through both."""
        pairs = ((name, (value, getattr(second, name))) for name, value in vars(first).items())
        return replace(first, **{name: a + (sequences - 1) * (b - a) for name, (a, b) in pairs if type(a) is not bool})

    def lines(first: tuple[Any, ...], second: tuple[Any, ...]) -> tuple[Any, ...]:
        return tuple(line(a, b) for a, b in zip(first, second, strict=True))

    return replace(
        one,
        units=lines(one.units, two.units),
        micro_batch=sequences,
        kept=lines(one.kept, two.kept),
        recomputed=lines(one.recomputed, two.recomputed),
    )
