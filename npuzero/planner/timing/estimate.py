"""Estimate of one way to train: bytes by memory, and seconds."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch

from npuzero.config import Settings
from npuzero.errors import ConfigError
from npuzero.parallel.pipeline_parallel.schedule import schedule
from npuzero.plan import (
    MOMENT_BLOCK,
    OFFLOADS,
    PIPE,
    PRECISIONS,
    SEQUENCE,
    TENSOR,
    Memory,
    MeshShape,
    Plan,
    Report,
)
from npuzero.planner.hardware.cluster import Cluster
from npuzero.planner.hardware.network import level_bytes
from npuzero.planner.hardware.rates import elementwise_s, find_compute_dtype, products_s
from npuzero.planner.model_work.axes import LayerTraffic
from npuzero.planner.model_work.job import TrainingJob, TrainingRun
from npuzero.planner.model_work.stages import StagedModel
from npuzero.planner.model_work.units import ModelWorkload, measure_workload
from npuzero.planner.timing.clock import StepClock, StepTimeline
from npuzero.planner.timing.memory import activation_bytes, estimate_memory, is_cpu, least_activations
from npuzero.planner.timing.steady_step import count_modelled_passes, get_steady_step


@dataclass(frozen=True)
class Estimate:
    """Hold the memory and time of one way to train.

    Attributes:
        job, run: the job, and the way to train it.
        work: compute and saved activations of the model's units in a pass.
        timeline: one step of one rank; None: not timed.
    """

    job: TrainingJob = field(repr=False)
    run: TrainingRun
    work: ModelWorkload = field(repr=False)
    timeline: StepTimeline | None = field(default=None, repr=False)

    @cached_property
    def reports(self) -> dict[int, Report]:
        """Return the report of :func:`npuzero.predict` for each pipeline rank, without activations."""
        return predict_reports(self.job, self.run)

    @property
    def report(self) -> Report:
        """Return the report of the rank that holds the most device memory, activations included."""
        return self.reports[self._fullest]

    @property
    def memory(self) -> dict[str, int]:
        """Return the bytes by memory (``device``, ``host``, ``nvme``) of the fullest rank, activations included."""
        return self._memories[self._fullest]

    @cached_property
    def _memories(self) -> dict[int, dict[str, int]]:
        return {rank: estimate_memory(self.job, self.run, each, self.work, rank) for rank, each in self.reports.items()}

    @cached_property
    def _fullest(self) -> int:
        return max(self._memories, key=lambda rank: self._memories[rank][Memory.DEVICE.value])

    @property
    def layers_sent(self) -> dict[str, dict[str, int]]:
        """Return by axis and collective the bytes of a rank's layers along tensor and sequence ranks in a step.

        For a pipeline, the sum of all stages. Recomputation, which repeats the forward's traffic, is not
        counted.
        """
        run, mesh = self.run, self.run.mesh
        itemsize = run.plan.precision.parameter_of(torch.float32).itemsize
        tokens = run.micro_batch * self.job.sequence // mesh.sequence
        return LayerTraffic.of(self.job.model, mesh).nbytes(mesh, itemsize, tokens, run.micro_batches)

    @property
    def sent_by_level(self) -> dict[str, int]:
        """Return the bytes that a rank sends in a step within a node and between nodes, layers included."""
        along: dict[str, Counter[str]] = {}
        for sent in (self.report.sent_along, self.layers_sent):
            for axis, verbs in sent.items():
                along.setdefault(axis, Counter()).update(verbs)
        return level_bytes(along, self.run.mesh, self.job.cluster)

    @property
    def tokens(self) -> int:
        """Return the tokens of a step on all ranks together."""
        return count_step_tokens(self.job, self.run)

    @property
    def step_s(self) -> float:
        """Return the seconds of a step; infinity if not timed."""
        return math.inf if self.timeline is None else self.timeline.step_s

    @property
    def tokens_per_s(self) -> float:
        """Return the tokens per second of one device."""
        return self.tokens / self.step_s / self.job.cluster.ranks

    @property
    def bound(self) -> str:
        """Return the resource that is busy longest in a step."""
        return "" if self.timeline is None else self.timeline.bound

    def over(self, spare: float = 0.0) -> dict[str, int]:
        """Return by memory the bytes above its limit or 0; a fraction ``spare`` of the device stays free."""
        limit = memory_limits(self.job.cluster, spare)
        return {memory: max(0, nbytes - limit.get(memory, nbytes)) for memory, nbytes in self.memory.items()}

    def arguments(self) -> dict[str, Any]:
        """Return the keyword arguments of :func:`npuzero.zero` for this run.

        The program itself must run ``run.micro_batches`` passes of ``run.micro_batch`` sequences, with activation
        checkpointing of the blocks if ``run.recompute``.
        """
        settings, plan = self.run.settings, self.run.plan
        if self.run.mesh.pipe > 1:  # npuzero.pipeline decides by itself whether they stay unsharded
            plan = replace(plan, between=None)
        return _plan_arguments(plan) | ({} if settings == Settings() else {"settings": settings})

    def axes(self) -> dict[str, int]:
        """Return the keyword arguments of :func:`npuzero.mesh` for tensor, sequence and pipe ranks; may be empty.

        With ``tensor`` the program first divides the model (:func:`npuzero.parallel.tensor`), with ``sequence`` its
        attention (:func:`npuzero.parallel.sequence`); with ``pipe`` it calls :func:`npuzero.pipeline` instead of
        ``zero``, with ``micro_batches=run.micro_batches``.
        """
        return self.run.mesh.sizes((PIPE, TENSOR, SEQUENCE))


def _plan_arguments(plan: Plan) -> dict[str, Any]:
    """Return arguments that make :func:`npuzero.zero` build ``plan``: names if possible, else the plan itself."""
    size = {} if plan.local_size is None else {"local_size": plan.local_size}
    offload = next((each for each in OFFLOADS if plan.name.endswith(f"+{each}") and each != plan.name), None)
    name = plan.name if offload is None else plan.name.removesuffix(f"+{offload}")
    beside = size if offload is None else size | {"offload": offload}
    # A name is only returned if it builds the same plan again, so that zero() trains exactly as estimated.
    for precision in PRECISIONS:
        try:
            made = Plan.preset(name, precision=precision, local_size=plan.local_size)
        except ConfigError:  # the caller's custom plan
            break
        if (made if offload is None else made.offloaded(offload)) == plan:
            return {"plan": name, "precision": precision, **beside}
    return {"plan": plan}


def predict_reports(job: TrainingJob, run: TrainingRun, all_ranks: bool = True) -> dict[int, Report]:
    """Return the bytes that one rank holds and sends in a step, by pipeline rank; the schedule is 1F1B.

    Args:
        all_ranks: whether to include all pipeline ranks; False: only candidates for the most memory.
    """
    plan, mesh, settings = run.plan, run.mesh, run.settings
    if mesh.pipe == 1:
        return {0: job.model.predict(plan, mesh, settings, micro_batches=run.micro_batches, clip=job.clip)}
    staged = StagedModel.of(job.model, mesh.pipe, tensor=mesh.tensor)
    table = schedule("1f1b", mesh.pipe, run.micro_batches)
    edge_bytes = staged.edge_bytes(run.micro_batch * job.sequence // mesh.sequence, plan.precision)
    ranks = None if all_ranks else staged.telling
    return staged.reports(plan, mesh, settings, table, job.clip, edge_bytes, ranks)


def count_step_tokens(job: TrainingJob, run: TrainingRun) -> int:
    """Return the tokens of a step on all ranks together."""
    return count_sequence_groups(run.mesh) * run.micro_batch * run.micro_batches * job.sequence


def count_sequence_groups(mesh: MeshShape) -> int:
    """Return the number of ranks, or of groups that share a sequence, with different sequences."""
    return mesh.data // mesh.sequence


def memory_limits(cluster: Cluster, spare: float = 0.0) -> dict[str, int]:
    """Return the byte limits of a rank's memories that are finite, less a fraction ``spare`` of the device."""
    device = int(cluster.device.memory_bytes * (1 - spare))
    return {Memory.DEVICE.value: device, Memory.HOST.value: cluster.host_memory_bytes}


class Estimator:
    """Estimate runs of one job; shared results are computed once.

    Attributes:
        looked, timed: number of runs checked for memory, and number of runs timed.
    """

    def __init__(self, job: TrainingJob) -> None:
        self.job = job
        self.looked = self.timed = 0
        self._reports: dict[tuple[Plan, MeshShape, Settings, int], dict[int, Report]] = {}
        self._trained: dict[tuple[Plan, MeshShape, Settings], Plan] = {}
        self._works: dict[tuple[int, torch.dtype], ModelWorkload] = {}
        self._clock = StepClock(job)
        self._numels: Counter[tuple[torch.dtype, bool, bool]] = Counter()
        for parameter in (each for unit in job.model.units for each in unit):
            self._numels[parameter.dtype, parameter.trainable, parameter.cut is not None] += parameter.shape.numel()

    def estimate(self, run: TrainingRun) -> Estimate:
        """Return a run that is not timed."""
        return Estimate(self.job, run, self._work_of(run))

    def fits(self, estimate: Estimate, spare: float) -> bool:
        """Tell whether each memory holds a run, with a fraction ``spare`` of the device left over.

        Two bounds are checked first: the predicted peak plus the peak of activations is an upper bound; stored bytes
        plus the peak of activations a lower bound. Only if the limit is between them, the moves of the step are
        followed.
        """
        self.looked += 1
        run, limit = estimate.run, memory_limits(self.job.cluster, spare)
        device = limit[Memory.DEVICE.value]
        if self.least_bytes(estimate) > device:
            return False
        reports = self._of(run)
        if max(report.memory[Memory.HOST.value] for report in reports.values()) > limit[Memory.HOST.value]:
            return False
        if run.mesh.pipe == 1:
            most = reports[0].memory[Memory.DEVICE.value] + activation_bytes(estimate.work, run.recompute)
            if most <= device and run.mesh.tensor == run.mesh.sequence == 1:
                return True
        held = (estimate_memory(self.job, run, report, estimate.work, rank) for rank, report in reports.items())
        return all(each[Memory.DEVICE.value] <= device for each in held)

    def as_trained(self, estimate: Estimate, spare: float) -> Estimate:
        """Return a run with parameters unsharded between micro-batches if :func:`npuzero.pipeline` keeps them so.

        Other runs, and runs that do not fit either way, are returned unchanged.
        """
        run = estimate.run
        if (
            run.mesh.pipe == 1
            or self.least_bytes(estimate) > memory_limits(self.job.cluster, spare)[Memory.DEVICE.value]
        ):
            return estimate
        key = run.plan, run.mesh, run.settings
        if key not in self._trained:
            staged = StagedModel.of(self.job.model, run.mesh.pipe, tensor=run.mesh.tensor)
            table, memory_bytes = schedule("1f1b", run.mesh.pipe, 2), self.job.cluster.device.memory_bytes
            self._trained[key] = staged.as_trained(*key, table, self.job.clip, memory_bytes)
        return replace(estimate, run=replace(run, plan=self._trained[key]))

    def time(self, estimate: Estimate) -> Estimate:
        """Return the run with its timeline."""
        self.timed += 1
        return replace(estimate, timeline=self._clock.time(estimate.run, estimate.work))

    def _resting_bytes(self, run: TrainingRun) -> float:
        """Return a lower bound of device bytes of parameters and states: the first pipeline rank's, without padding."""
        mesh = run.mesh
        stage = StagedModel.of(self.job.model, mesh.pipe, tensor=mesh.tensor).first_share if mesh.pipe > 1 else 1.0
        plan, precision = run.plan, run.plan.precision
        total = 0.0
        for (dtype, trainable, cut), whole in self._numels.items():
            numel = whole * stage / (mesh.tensor if cut else 1)
            own = precision.parameter_of(dtype)
            total += 0 if plan.parameters.far else numel * own.itemsize / run.mesh.size(plan.parameters.axes)
            if trainable:
                near = (1 - plan.states.share) if plan.states.far else 1.0
                states = precision.master_bytes(own) + 2 * precision.moment_bytes(MOMENT_BLOCK) / MOMENT_BLOCK
                total += near * numel * states / run.mesh.size(plan.states.axes)
        return total

    def least_bytes(self, estimate: Estimate) -> float:
        """Return a lower bound of a rank's device bytes: stored parts plus the peak of activations."""
        return self._resting_bytes(estimate.run) + least_activations(estimate.run, estimate.work)

    def least_s(self, run: TrainingRun) -> float:
        """Return a lower bound of a step's seconds: compute, traffic of layers, and the fill of the pipeline.

        The plan's own communication is left out.
        """
        work, device, mesh = self._work_of(run), self.job.cluster.device, run.mesh
        dtype, tokens = find_compute_dtype(run.plan), work.micro_batch * work.sequence // mesh.sequence
        again = work.units[1:] if run.recompute else ()
        flops = 3 * sum(unit.flops for unit in work.units) + sum(unit.flops for unit in again)
        nbytes = sum(unit.forward_bytes + unit.backward_bytes for unit in work.units)
        nbytes += sum(unit.forward_bytes for unit in again)
        seconds = products_s(device, flops, dtype, tokens) + elementwise_s(device, nbytes, dtype)
        layers = sum(LayerTraffic.of(self.job.model, mesh).seconds(self.job.cluster, mesh, run.plan, tokens))
        each = (seconds / (mesh.tensor * mesh.sequence) + layers) / mesh.pipe
        return (run.micro_batches + mesh.pipe - 1) * each

    def _of(self, run: TrainingRun) -> dict[int, Report]:
        """Return the reports of a run by pipeline rank, cached.

        Memory does not grow with micro-batches above a few, or above the number that fills the pipeline: so runs share
        one report.
        """
        few = (
            min(run.micro_batches, run.mesh.pipe + 1) if run.mesh.pipe > 1 else count_modelled_passes(run.micro_batches)
        )
        key = run.plan, run.mesh, run.settings, few
        if key not in self._reports:
            if run.mesh.pipe == 1:  # together with the moves that the clock uses
                found = {
                    0: get_steady_step(self.job.model, run.plan, run.mesh, run.settings, few, self.job.clip).report
                }
            else:
                found = predict_reports(self.job, replace(run, micro_batches=few), all_ranks=False)
            self._reports[key] = found
        return self._reports[key]

    def _work_of(self, run: TrainingRun) -> ModelWorkload:
        return self._work(run.micro_batch, run.plan.precision.parameter_of(torch.float32))

    def _work(self, sequences: int, dtype: torch.dtype) -> ModelWorkload:
        """Return the work of a pass: measured for one and two sequences, and extrapolated linearly for more."""
        key = sequences, dtype
        if key not in self._works:
            job = self.job
            if sequences <= 2:
                cpu = is_cpu(job.cluster)
                whole = job.model.undivided or job.model
                work = measure_workload(whole, job.sequence, sequences, job.attention, dtype, cpu)
            else:
                work = _extrapolate_workload(self._work(1, dtype), self._work(2, dtype), sequences)
            self._works[key] = work
        return self._works[key]


def _extrapolate_workload(one: ModelWorkload, two: ModelWorkload, sequences: int) -> ModelWorkload:
    """Compute the work of ``sequences`` by linear extrapolation from one and two."""

    def line(first: Any, second: Any) -> Any:
        """Return a record with each number on the line through both."""
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
