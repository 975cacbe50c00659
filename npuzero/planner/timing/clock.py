"""The clock: how long a step takes, as spans on lanes.

What happens in which order is the engine's own schedule (:func:`npuzero.plan.prediction.step_schedule.steady_step`);
how long each of it takes is four lines of arithmetic:

    products            FLOPs over the part of the peak that a device sustains
    element-wise work   bytes over what its memory sustains; so the optimizer, packing, rounding to thin wires
    collectives         :func:`npuzero.planner.hardware.network.collective_s`: latency and bytes over bandwidth, by
    level copies              bytes over the link between two memories

Compute and each kind of collective have a lane (:mod:`npuzero.planner.timing.lanes`). Shapes of tiles, and how fast a
product of this or that size is, are left out: they add nothing to what is known of whole training runs.
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

#: What may bound a step, by what is busy: work of the device, links, and the update on the host.
_BOUNDS = {"products": "compute", "recomputation": "compute", "element-wise": "memory", "update": "optimizer"}
_COPIES = {TO_HOST: "host link", TO_DEVICE: "host link", TO_DISK: "disk", FROM_DISK: "disk"}


@dataclass(frozen=True)
class StepTimeline:
    """Hold how long a step takes, and what it spends that on.

    Attributes:
        step_s: seconds of a step.
        parts: of these, seconds by what compute does: ``products``, ``recomputation``, ``element-wise``, ``update``,
            ``contention``, ``wait for ...``, and in a pipeline ``bubble``; their sum is the step.
        busy: seconds that each lane is busy: ``compute``, collectives by channel, what ``layers`` and ``stages`` send,
            copies by link, the host's update.
        bound: what is busy longest: ``compute``, ``memory``, ``local link``, ``node link``, ``host link``, ``disk`` or
            ``optimizer``.
        tokens: of a step, per device.
    """

    step_s: float
    parts: Mapping[str, float]
    busy: Mapping[str, float]
    bound: str
    tokens: float
    _play: _ProgramTiming = field(repr=False)

    @property
    def tokens_per_s(self) -> float:
        """Return tokens a second and device."""
        return self.tokens / self.step_s

    @cached_property
    def spans(self) -> tuple[Span, ...]:
        """Return what runs when, from the begin of the step; what it started for the next one runs past its end. Of a
        pipeline this is the slowest stage, without what it waits for others.
        """
        return self._play.spans()

    def write_trace(self, path: str | os.PathLike[str]) -> None:
        """Write the spans for Perfetto or chrome://tracing, in the form in which a run writes its own.

        Raises:
            StorageError: the file cannot be written.
        """
        sink = ChromeTrace(path)
        for span in self.spans:
            sink.write(span)
        sink.close()


def step_time(job: TrainingJob, run: TrainingRun, work: ModelWorkload) -> StepTimeline:
    """Return how long a step takes.

    Args:
        job, run: what is asked, and the way to train.
        work: of the model's units in one micro-batch on one rank.

    Raises:
        ConfigError: work of other units than the model's, or of a dtype that the device has no peak for.
    """
    return StepClock(job).time(run, work)


class StepClock:
    """Time steps of one job: what they have in common is worked out once."""

    def __init__(self, job: TrainingJob) -> None:
        self._job = job
        self._programs: dict[object, StepProgram] = {}

    def time(self, run: TrainingRun, work: ModelWorkload) -> StepTimeline:
        """Return how long a step takes, as :func:`step_time`."""
        job, units = self._job, self._job.model.units
        if len(work.units) != len(units):
            raise ConfigError(
                f"work of {job.model.name}",
                expected=f"that of its {len(units)} units",
                got=f"{len(work.units)}",
                do="Count it for the same model.",
            )
        mesh = run.plan.mesh_shape(run.mesh)
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
        """Return what compute waits for within a micro-batch."""
        cluster, model = self._job.cluster, self._job.model
        tokens = work.micro_batch * work.sequence // mesh.sequence
        layers = LayerTraffic.of(model, mesh).seconds(cluster, mesh, run.plan, tokens)
        width = next((p.shape[-1] for p in model.units[0] if len(p.shape) > 1), 1)
        exchange = stage_exchange_s(cluster, mesh, run.plan, tokens, width)
        links = find_link_name(cluster, mesh, (TENSOR, SEQUENCE)), find_link_name(cluster, mesh, (PIPE,))
        return _AxisWaits(layers[: len(work.units)], exchange, mesh.pipe, *links)


@dataclass(frozen=True)
class _AxisWaits:
    """Hold what compute waits for within a micro-batch, along axes beside ZeRO's own.

    Attributes:
        layers: by unit, seconds of what its layers send, forward and backward together.
        exchange_s: in which activations go to the next stage, or their gradients to the one before.
        stages: of a pipeline.
        layers_link, stages_link: over which they go.
    """

    layers: tuple[float, ...]
    exchange_s: float
    stages: int
    layers_link: str
    stages_link: str


@dataclass(frozen=True)
class _ProgramTiming:
    """Run a program with what a run's units compute."""

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
        """Run two steps, of which the second begins as the first left it."""
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
        """Return what a stage waits for the others: where a pipeline fills and drains, a micro-batch of each other
        stage and its way there and back; and each micro-batch's way, where that is not hidden beside others.

        As in 1F1B (Narayanan et al., arXiv:2104.04473, section 2.2), whose bubble is (p - 1) / m of the rest.
        """
        others = self.waits.stages - 1
        if not others:
            return {}
        pass_s = sum(compute + blocked for unit in acts for compute, blocked in unit)
        ways = 2 * self.waits.exchange_s
        exposed = 0 if self.run.settings.overlaps_activations else self.micro_batches
        return {"bubble": others * (pass_s + ways), "wait for stages": exposed * ways}

    def _totals(self) -> Totals:
        """Return what a step keeps busy, that of layers and stages among it."""
        totals = self.program.totals(self.micro_batches)
        waits, times = self.waits, self.micro_batches
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
        """Return the seconds of each unit's passes. What the root computes it computes behind the blocks, though its
        forward begins before them: so it counts with its backward.
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
        """Return the seconds of compute by what it does."""
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
    """Return what is busy longest; where that is the device, with what."""
    device: dict[str, float] = {}
    for part, what in _BOUNDS.items():
        device[what] = device.get(what, 0.0) + parts[part]
    others: dict[str, float] = {}
    for (kind, name), seconds in totals.items():
        if kind == "link" or name in _COPIES or (kind, name) == ("lane", "update"):
            what = "optimizer" if name == "update" else _COPIES.get(name, name)
            others[what] = max(others.get(what, 0.0), seconds)
    most = max(others, key=lambda what: others[what], default="")
    return most if most and others[most] > sum(device.values()) else max(device, key=lambda what: device[what])
