"""Simulated time of a step, as spans on lanes.

The order of events is the engine's own schedule (:func:`npuzero.plan.prediction.step_schedule.steady_step`). Their
duration is simple arithmetic:

    products            FLOPs over the sustained fraction of the device's peak
    element-wise work   bytes over sustained memory bandwidth; also optimizer, packing and quantization
    collectives         latency, and bytes over bandwidth, by level (:mod:`npuzero.planner.hardware.network`)
    copies              bytes over the link between two memories

Compute and each kind of collective have a lane (:mod:`npuzero.planner.timing.lanes`). Tile shapes and the efficiency of
single product sizes are left out: they explain nothing more about measured training runs.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property

from npuzero.errors import ConfigError
from npuzero.observe import ChromeTrace, Span
from npuzero.plan import PIPE, SEQUENCE, TENSOR, MeshShape
from npuzero.plan.prediction.report import FROM_DISK, TO_DEVICE, TO_DISK, TO_HOST
from npuzero.planner.hardware.cluster import Cluster
from npuzero.planner.hardware.rates import elementwise_s, find_compute_dtype, find_link_name, products_s
from npuzero.planner.model_work.axes import LayerTraffic, divide_workload, slowest_stage_shape, stage_exchange_s
from npuzero.planner.model_work.job import TrainingJob, TrainingRun
from npuzero.planner.model_work.units import ModelWorkload, UnitWork
from npuzero.planner.timing import lanes
from npuzero.planner.timing.program import StepProgram, Totals, unit_name
from npuzero.planner.timing.steady_step import count_modelled_passes, get_steady_step

#: Bottleneck by kind of work on the device and of the update on the host.
_BOUNDS = {"products": "compute", "recomputation": "compute", "element-wise": "memory", "update": "optimizer"}
_COPIES = {TO_HOST: "host link", TO_DEVICE: "host link", TO_DISK: "disk", FROM_DISK: "disk"}


@dataclass(frozen=True)
class StepTimeline:
    """Hold the duration of a step and its breakdown.

    Attributes:
        step_s: seconds of a step.
        parts: seconds by kind of compute: ``products``, ``recomputation``, ``element-wise``, ``update``,
            ``contention``, ``wait for ...``, and in a pipeline ``bubble``; they add up to the step.
        busy: seconds that each lane is busy: ``compute``, collectives by channel, traffic of ``layers`` and ``stages``,
            copies by link, the host's update.
        bound: the resource that is busy longest: ``compute``, ``memory``, ``local link``, ``node link``,
            ``host link``, ``disk`` or ``optimizer``.
        tokens: tokens of a step, per device.
    """

    step_s: float
    parts: Mapping[str, float]
    busy: Mapping[str, float]
    bound: str
    tokens: float
    _play: _ProgramTiming = field(repr=False)

    @property
    def tokens_per_s(self) -> float:
        """Return tokens per second and device."""
        return self.tokens / self.step_s

    @cached_property
    def spans(self) -> tuple[Span, ...]:
        """Return the spans from the start of the step; work started for the next step ends after this one.

        For a pipeline these are the spans of the slowest stage, without its waits for other stages.
        """
        return self._play.spans()

    def write_trace(self, path: str | os.PathLike[str]) -> None:
        """Write the spans for Perfetto or chrome://tracing, in the format of a run's own trace.

        Raises:
            StorageError: the file cannot be written.
        """
        sink = ChromeTrace(path)
        for span in self.spans:
            sink.write(span)
        sink.close()


def step_time(job: TrainingJob, run: TrainingRun, work: ModelWorkload) -> StepTimeline:
    """Return the simulated time of a step.

    Args:
        job, run: the job, and the way to train it.
        work: work of the model's units in one micro-batch on one rank.

    Raises:
        ConfigError: the work has another number of units than the model, or the device has no peak for the dtype.
    """
    return StepClock(job).time(run, work)


class StepClock:
    """Time steps of one job in a simulation; shared results are computed once."""

    def __init__(self, job: TrainingJob) -> None:
        self._job = job
        self._programs: dict[object, StepProgram] = {}

    def time(self, run: TrainingRun, work: ModelWorkload) -> StepTimeline:
        """Return the simulated time of a step, as :func:`step_time`."""
        job, units = self._job, self._job.model.units
        if len(work.units) != len(units):
            raise ConfigError(
                f"work of {job.model.name}",
                expected=f"that of its {len(units)} units",
                got=f"{len(work.units)}",
                do="Count it for the same model.",
            )
        mesh = run.plan.mesh_shape(run.mesh)
        # All stages wait for the slowest one, so only that is simulated, as a model without a pipeline.
        stage = slowest_stage_shape(job.model, mesh.pipe)
        here = divide_workload(work, job.model, mesh)
        own = replace(here, units=here.units[: len(stage.units)])
        alone = replace(mesh, pipe=1)  # the ranks of a stage
        key = run.plan, mesh, run.settings, count_modelled_passes(run.micro_batches)
        if key not in self._programs:
            own_step = get_steady_step(
                stage, run.plan, alone, run.settings, count_modelled_passes(run.micro_batches), job.clip
            )
            self._programs[key] = StepProgram.of(own_step, job.cluster)
        sequences = mesh.data / mesh.sequence * run.micro_batch * run.micro_batches
        played = _ProgramTiming(self._programs[key], job.cluster, own, run, self._waits(run, mesh, own))
        return played.timeline(sequences * work.sequence / mesh.world)

    def _waits(self, run: TrainingRun, mesh: MeshShape, work: ModelWorkload) -> _AxisWaits:
        """Return the waits of compute within a micro-batch."""
        cluster, model = self._job.cluster, self._job.model
        tokens = work.micro_batch * work.sequence // mesh.sequence
        layers = LayerTraffic.of(model, mesh).seconds(cluster, mesh, run.plan, tokens)
        width = next((p.shape[-1] for p in model.units[0] if len(p.shape) > 1), 1)
        exchange = stage_exchange_s(cluster, mesh, run.plan, tokens, width)
        links = find_link_name(cluster, mesh, (TENSOR, SEQUENCE)), find_link_name(cluster, mesh, (PIPE,))
        return _AxisWaits(layers[: len(work.units)], exchange, mesh.pipe, *links)


@dataclass(frozen=True)
class _AxisWaits:
    """Hold the waits of compute within a micro-batch for tensor, sequence and pipe ranks.

    Attributes:
        layers: by unit, seconds of its layers' collectives, forward and backward together.
        exchange_s: seconds to send activations to the next stage, or their gradients to the previous one.
        stages: stages of the pipeline.
        layers_link, stages_link: links that these use.
    """

    layers: tuple[float, ...]
    exchange_s: float
    stages: int
    layers_link: str
    stages_link: str


@dataclass(frozen=True)
class _ProgramTiming:
    """Run a program with the compute of a run's units."""

    program: StepProgram
    cluster: Cluster
    work: ModelWorkload
    run: TrainingRun
    waits: _AxisWaits

    @property
    def micro_batches(self) -> int:
        return self.run.micro_batches

    @property
    def recompute(self) -> bool:
        return self.run.recompute

    def timeline(self, tokens: float) -> StepTimeline:
        """Time a steady step: if traffic is left running at the end, run the step again and time the second run."""
        steps = self.program.steps(self.micro_batches)
        acts = self._acts()
        player = lanes.ProgramPlayer(acts, self.cluster.contention)
        player.play(steps)
        begin = 0.0
        if not player.quiet:
            begin = player.now
            player.waited.clear()
            player.contended_s = 0.0
            player.play(steps)
        totals = self._totals()
        parts = self._parts(totals)
        busy = {"compute": sum(parts.values())} | {lane: s for (kind, lane), s in totals.items() if kind == "lane"}
        parts |= {"contention": player.contended_s}
        parts |= {f"wait for {kind}": seconds for kind, seconds in player.waited.items()}
        stages = self._stages(acts)
        step_s = max(player.now - begin + sum(stages.values()), *busy.values())
        return StepTimeline(step_s, parts | stages, busy, _find_bottleneck(parts, totals), tokens, self)

    def _stages(self, acts: lanes.Acts) -> dict[str, float]:
        """Return a stage's waits for the other stages.

        While the pipeline fills and drains, it waits for one micro-batch of each other stage and its transfers.
        Transfers of each micro-batch also count where they are not overlapped. As in 1F1B (Narayanan et al.,
        arXiv:2104.04473, section 2.2), the bubble is (p - 1) / m of the rest.
        """
        others = self.waits.stages - 1
        if not others:
            return {}
        pass_s = sum(compute + blocked for unit in acts for compute, blocked in unit)
        ways = 2 * self.waits.exchange_s
        exposed = 0 if self.run.settings.overlaps_activations else self.micro_batches
        return {"bubble": others * (pass_s + ways), "wait for stages": exposed * ways}

    def _totals(self) -> Totals:
        """Return the busy seconds of a step by resource, including traffic of layers and stages."""
        totals = self.program.totals(self.micro_batches)
        waits, times = self.waits, self.micro_batches
        # Recomputation repeats the forward's half of the layers' traffic.
        for lane, link, seconds in (
            ("layers", waits.layers_link, times * sum(waits.layers) * (1.5 if self.recompute else 1.0)),
            ("stages", waits.stages_link, times * 2 * waits.exchange_s),
        ):
            if seconds:
                totals["lane", lane] = seconds
                totals["link", link] = totals.get(("link", link), 0.0) + seconds
        return totals

    def spans(self) -> tuple[Span, ...]:
        """Return the spans of a steady step."""
        names = [unit_name(i) for i in range(len(self.work.units))]
        player = lanes.ProgramPlayer(self._acts(), self.cluster.contention, names)
        steps = self.program.steps(self.micro_batches)
        player.play(steps)
        begin, kept = player.now, len(player.spans)
        player.play(steps)
        return tuple(
            Span(s.category, s.name, s.begin_s - begin, s.end_s - begin, 0, s.facts) for s in player.spans[kept:]
        )

    def _acts(self) -> lanes.Acts:
        """Return the seconds of each unit's passes.

        The root's own compute runs after the blocks, although its forward begins before them: so it counts in its
        backward.
        """
        acts = []
        for i, (unit, added) in enumerate(zip(self.work.units, self.program.added, strict=True)):
            forward, backward = self._products_s(unit, 1) + self._own_s(unit.forward_bytes), self._backward_s(unit, i)
            backward += elementwise_s(self.cluster.device, added)
            half = self.waits.layers[i] / 2
            if i:
                acts.append(((forward, half), (backward, half * (1 + self.recompute))))
            else:
                acts.append(((0.0, 0.0), (forward + backward, 2 * half)))
        return acts

    def _backward_s(self, unit: UnitWork, index: int) -> float:
        again = self.recompute and index > 0
        return self._products_s(unit, 2 + again) + self._own_s(unit.backward_bytes + again * unit.forward_bytes)

    def _products_s(self, unit: UnitWork, times: int) -> float:
        return times * unit.flops * self._flop_s

    def _own_s(self, nbytes: float) -> float:
        return nbytes * self._byte_s

    @cached_property
    def _flop_s(self) -> float:
        tokens = self.work.micro_batch * self.work.sequence / self.run.mesh.sequence
        return products_s(self.cluster.device, 1.0, find_compute_dtype(self.run.plan), tokens)

    @cached_property
    def _byte_s(self) -> float:
        return elementwise_s(self.cluster.device, 1.0, find_compute_dtype(self.run.plan))

    def _parts(self, totals: Totals) -> dict[str, float]:
        """Return the seconds of compute by kind of work."""
        units, times = self.work.units, self.micro_batches
        nbytes = sum(unit.forward_bytes + unit.backward_bytes for unit in units)
        again = [self._products_s(unit, 1) + self._own_s(unit.forward_bytes) for unit in units[1:] if self.recompute]
        added = elementwise_s(self.cluster.device, sum(self.program.added))
        return {
            "products": times * sum(self._products_s(unit, 3) for unit in units),
            "recomputation": times * sum(again),
            "element-wise": times * (self._own_s(nbytes) + added) + totals.get(("work", "element-wise"), 0.0),
            "update": totals.get(("work", "update"), 0.0),
        }


def _find_bottleneck(parts: Mapping[str, float], totals: Totals) -> str:
    """Return the resource that is busy longest; for the device, its longest kind of work."""
    device: dict[str, float] = {}
    for part, what in _BOUNDS.items():
        device[what] = device.get(what, 0.0) + parts[part]
    others: dict[str, float] = {}
    for (kind, name), seconds in totals.items():
        if kind == "link" or name in _COPIES or (kind, name) == ("lane", "update"):
            what = "optimizer" if name == "update" else _COPIES.get(name, name)
            others[what] = max(others.get(what, 0.0), seconds)
    # The device's kinds of work share one lane, so their sum competes with the links; links run in parallel.
    most = max(others, key=lambda what: others[what], default="")
    return most if most and others[most] > sum(device.values()) else max(device, key=lambda what: device[what])
