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
    """Say what one way to train takes.

    Attributes:
        job, run: what is trained where, and how.
        work: what the model's units compute and keep in a pass.
        timeline: one step of one rank; None: it was not timed.
    """

    job: TrainingJob = field(repr=False)
    run: TrainingRun
    work: ModelWorkload = field(repr=False)
    timeline: StepTimeline | None = field(default=None, repr=False)

    @cached_property
    def reports(self) -> dict[int, Report]:
        """Return what :func:`npuzero.predict` says of the run, by the rank of the pipeline: the bytes of a rank,
        activations apart.
        """
        return predict_reports(self.job, self.run)

    @property
    def report(self) -> Report:
        """Return that of the rank that holds most, activations included."""
        return self.reports[self._fullest]

    @property
    def memory(self) -> dict[str, int]:
        """Return the most bytes of a rank by memory (``device``, ``host``, ``nvme``), activations included."""
        return self._memories[self._fullest]

    @cached_property
    def _memories(self) -> dict[int, dict[str, int]]:
        return {rank: estimate_memory(self.job, self.run, each, self.work, rank) for rank, each in self.reports.items()}

    @cached_property
    def _fullest(self) -> int:
        return max(self._memories, key=lambda rank: self._memories[rank][Memory.DEVICE.value])

    @property
    def layers_sent(self) -> dict[str, dict[str, int]]:
        """Return by axis and collective what the layers of a rank send in a step along tensor and sequence ranks; of a
        pipeline, those of all stages together. Recomputation, which sends that of forward again, is not counted.
        """
        run, mesh = self.run, self.run.mesh
        itemsize = run.plan.precision.parameter_of(torch.float32).itemsize
        tokens = run.micro_batch * self.job.sequence // mesh.sequence
        return LayerTraffic.of(self.job.model, mesh).nbytes(mesh, itemsize, tokens, run.micro_batches)

    @property
    def sent_by_level(self) -> dict[str, int]:
        """Return the bytes that a rank sends in a step within a node and between nodes, its layers' among them."""
        along: dict[str, Counter[str]] = {}
        for sent in (self.report.sent_along, self.layers_sent):
            for axis, verbs in sent.items():
                along.setdefault(axis, Counter()).update(verbs)
        return level_bytes(along, self.run.mesh, self.job.cluster)

    @property
    def tokens(self) -> int:
        """Return the tokens of a step, of all ranks together."""
        return count_step_tokens(self.job, self.run)

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
        limit = memory_limits(self.job.cluster, spare)
        return {memory: max(0, nbytes - limit.get(memory, nbytes)) for memory, nbytes in self.memory.items()}

    def arguments(self) -> dict[str, Any]:
        """Return the keyword arguments of :func:`npuzero.zero` that train so.

        The program's own part are ``run.micro_batch`` sequences in each of ``run.micro_batches`` passes, and
        activation checkpointing of the blocks where ``run.recompute``.
        """
        settings, plan = self.run.settings, self.run.plan
        if self.run.mesh.pipe > 1:  # npuzero.pipeline finds out by itself whether they stay unsharded
            plan = replace(plan, between=None)
        return _plan_arguments(plan) | ({} if settings == Settings() else {"settings": settings})

    def axes(self) -> dict[str, int]:
        """Return the keyword arguments of :func:`npuzero.mesh` for axes beside ZeRO's own; none, where there are none.

        With ``tensor`` the model is divided first (:func:`npuzero.parallel.tensor`), with ``sequence`` its attention
        is (:func:`npuzero.parallel.sequence`); with ``pipe`` :func:`npuzero.pipeline` stands for ``zero``, with
        ``micro_batches=run.micro_batches``.
        """
        return self.run.mesh.sizes((PIPE, TENSOR, SEQUENCE))


def _plan_arguments(plan: Plan) -> dict[str, Any]:
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


def predict_reports(job: TrainingJob, run: TrainingRun, all_ranks: bool = True) -> dict[int, Report]:
    """Return the bytes that one rank holds and sends in a step, by the rank of the pipeline; its schedule is 1F1B.

    Args:
        all_ranks: of a pipeline; False: those alone of which one holds most.
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
    """Return the tokens of a step, of all ranks together."""
    return count_sequence_groups(run.mesh) * run.micro_batch * run.micro_batches * job.sequence


def count_sequence_groups(mesh: MeshShape) -> int:
    """Return how many ranks, or groups of ranks that share a sequence, have sequences of their own."""
    return mesh.data // mesh.sequence


def memory_limits(cluster: Cluster, spare: float = 0.0) -> dict[str, int]:
    """Return the bytes that a rank may have of each memory that has an end; of the device without a part ``spare``."""
    device = int(cluster.device.memory_bytes * (1 - spare))
    return {Memory.DEVICE.value: device, Memory.HOST.value: cluster.host_memory_bytes}


class Estimator:
    """Estimate runs of one job; what they have in common is worked out once.

    Attributes:
        looked, timed: of how many it was asked whether they fit, and how many have been timed.
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
        """Return a run, not timed."""
        return Estimate(self.job, run, self._work_of(run))

    def fits(self, estimate: Estimate, spare: float) -> bool:
        """Tell whether each memory holds a run, with a part ``spare`` of the device's left over.

        What a prediction has at its highest, and activations at theirs, are together the most that there can be; what
        rests, and activations at their highest, the least. Where the limit is between them, the step is walked through.
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
        """Return a run of a pipeline with parameters unsharded between micro-batches where :func:`npuzero.pipeline`
        would have them so; any other as it is, and what has not the memory either way.
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
        """Return what parameters and states take at least where they rest on the device, in a pipeline the first
        rank's: without any padding.
        """
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
        """Return bytes that a rank's device holds at least: what rests there, and activations at their highest."""
        return self._resting_bytes(estimate.run) + least_activations(estimate.run, estimate.work)

    def least_s(self, run: TrainingRun) -> float:
        """Return seconds that a step takes at least: what its units compute, whatever a plan sends; what layers wait
        for; and what a pipeline waits for while it fills.
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
        """Return what a run holds, by the rank of the pipeline: the same for all that have a few micro-batches, or as
        many as fill the pipeline; so that one serves for them.
        """
        few = (
            min(run.micro_batches, run.mesh.pipe + 1) if run.mesh.pipe > 1 else count_modelled_passes(run.micro_batches)
        )
        key = run.plan, run.mesh, run.settings, few
        if key not in self._reports:
            if run.mesh.pipe == 1:  # with the moves that the clock reads, too
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
        """Return the work of a pass. Of one sequence and of two it is counted; each further one adds as much as the
        second.
        """
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
