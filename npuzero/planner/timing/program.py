"""Program of a step: the engine's schedule as timed steps on lanes."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import torch

from npuzero.plan import Axes, MeshShape, Plan
from npuzero.plan.prediction.report import FROM_DISK, TO_DEVICE, TO_DISK, TO_HOST
from npuzero.plan.prediction.step_schedule import StepSpec as Schedule
from npuzero.plan.sizes.flat_sizes import FlatKind
from npuzero.plan.sizes.memory_tiers import RING_SLOTS
from npuzero.plan.sizes.unit_states import PlannedUnit, build_planned_units
from npuzero.plan.table.step_moves import (
    CollectivePurpose,
    ComputePass,
    CopyBytes,
    HostUpdate,
    LaunchReduction,
    Move,
    PlannedCollective,
    RepeatMoves,
    StartCollective,
    WaitCollective,
)
from npuzero.planner.hardware.cluster import Cluster
from npuzero.planner.hardware.network import collective_s
from npuzero.planner.hardware.rates import elementwise_s, find_link_name, update_bytes
from npuzero.planner.timing import lanes
from npuzero.planner.timing.steady_step import SteadyStep

_FP32 = torch.float32.itemsize
#: Link of the cluster for each kind of copy.
_LINKS = {TO_HOST: "host", TO_DEVICE: "host", TO_DISK: "disk_write", FROM_DISK: "disk_read"}
#: Bytes per second that one rank's update on the host reads and writes. Unsourced, an estimate: half of an eighth of
#: two sockets with eight channels of DDR4-3200 each, 410 GB/s.
_HOST_BYTES_PER_S = 25e9
#: Seconds of steps by resource: ``("lane", ...)``, ``("link", ...)``, and on the device ``("work", ...)``.
Totals = dict[tuple[str, str], float]


@dataclass(frozen=True)
class StepProgram:
    """Hold the steps of a rank: before the equal micro-batches, of one of these, and after them.

    Attributes:
        added: by unit, bytes that backward reads and writes to pack or accumulate its gradients.
    """

    begin: tuple[lanes.Step, ...]
    middle: tuple[lanes.Step, ...]
    end: tuple[lanes.Step, ...]
    added: tuple[float, ...]

    @staticmethod
    def of(steady: SteadyStep, cluster: Cluster) -> StepProgram:
        """Return the program of a steady step."""
        moves = steady.moves
        units = build_planned_units(steady.flats, steady.plan, steady.mesh)
        writer = _ProgramWriter(cluster, steady.mesh, steady.plan, units, steady.step)
        at = next((i for i, move in enumerate(moves) if isinstance(move, RepeatMoves) and _has_compute(move)), -1)
        # The device's update is not a move of the schedule: it runs after the last move of gradients.
        last = next((i for i in range(len(moves), 0, -1) if _precedes_update(moves[i - 1])), 0)
        done = (*writer.steps(moves[max(at + 1, 0) : last]), *writer.update(), *writer.steps(moves[last:]))
        alike = moves[at] if at >= 0 else None
        if not isinstance(alike, RepeatMoves):
            return StepProgram((), (), done, writer.added())
        return StepProgram(tuple(writer.steps(moves[:at])), tuple(writer.steps(alike.moves)), done, writer.added())

    @cached_property
    def _totals(self) -> tuple[Totals, Totals]:
        return sum_lane_seconds((*self.begin, *self.end)), sum_lane_seconds(self.middle)

    def totals(self, micro_batches: int) -> Totals:
        """Return the busy seconds of a step with ``micro_batches``, without waits and contention."""
        totals, middle = dict(self._totals[0]), self._totals[1]
        for key, seconds in middle.items():
            totals[key] = totals.get(key, 0.0) + (micro_batches - 2) * seconds
        return totals

    def steps(self, micro_batches: int) -> tuple[lanes.Step, ...]:
        """Return the steps for ``micro_batches``: exactly one, or any number from two on."""
        middle = (lanes.RepeatSteps(micro_batches - 2, self.middle),) if self.middle else ()
        return (*self.begin, *middle, *self.end)


def _has_compute(repeat: RepeatMoves) -> bool:
    return any(isinstance(move, ComputePass) for move in repeat.moves)


def _precedes_update(move: Move) -> bool:
    """Tell whether the update comes after ``move``; the last such move completes the gradients."""
    if isinstance(move, StartCollective):
        return move.collective.purpose not in (CollectivePurpose.GATHER, CollectivePurpose.RESTORE)
    if isinstance(move, WaitCollective):
        return move.purpose not in (CollectivePurpose.GATHER, CollectivePurpose.RESTORE)
    return isinstance(move, (ComputePass, LaunchReduction)) or (isinstance(move, RepeatMoves) and _has_compute(move))


@dataclass
class _ProgramWriter:
    """Convert moves to steps of lanes with durations."""

    cluster: Cluster
    mesh: MeshShape
    plan: Plan
    units: Sequence[PlannedUnit]
    step: Schedule
    _known: dict[tuple[CollectivePurpose, str, Axes, int], tuple[str, str, float, float]] = field(default_factory=dict)

    def steps(self, moves: Iterable[Move]) -> list[lanes.Step]:
        """Return the steps of ``moves``; moves that take no time are left out."""
        steps: list[lanes.Step] = []
        for move in moves:
            if isinstance(move, StartCollective):
                self._start(move.collective, move.count, steps)
            elif isinstance(move, WaitCollective):
                steps.append(
                    lanes.AwaitCollectives(
                        _collective_key(move.purpose, move.unit), move.count, move.purpose.value, move.unit
                    )
                )
            elif isinstance(move, LaunchReduction):
                self._elementwise(self._rounded[move.unit], steps)
            elif isinstance(move, ComputePass):
                steps += () if move.backward else self._settled[move.unit]
                steps.append(lanes.UnitPass(move.unit, move.backward))
            elif isinstance(move, CopyBytes):
                seconds = move.count * self._copy_s(move.link, move.nbytes)
                steps.append(lanes.MemoryTransfer(move.link, seconds, move.link in (TO_DEVICE, FROM_DISK)))
            elif isinstance(move, RepeatMoves):
                steps.append(self._chunks(move) or lanes.RepeatSteps(move.times, tuple(self.steps(move.moves))))
        return steps

    def update(self) -> list[lanes.Step]:
        """Return the update of states on the device; a lag first waits for the last step's offloaded update."""
        nbytes = sum(
            count * kind.near * update_bytes(kind.plan.precision, kind.dtype, self.step.moments, self.step.clip)
            for unit in self.units
            for kind, count in unit.trainable
        )
        settled: list[lanes.Step] = [lanes.AwaitChunks(None)] if self.plan.lag else []
        device = self.cluster.device
        return [*settled, *([lanes.DeviceWork("update", elementwise_s(device, nbytes))] if nbytes else [])]

    def added(self) -> tuple[float, ...]:
        """Return by unit the bytes read and written to pack a pass's gradients for sending, or to accumulate them."""
        return tuple(
            sum(
                count * kind.numel * (kind.dtype.itemsize + (kind.wire.itemsize if kind.scattered else 2 * _FP32))
                for kind, count in unit.trainable
            )
            for unit in self.units
        )

    @cached_property
    def _rounded(self) -> list[float]:
        """Return by unit the bytes that one launch reads and writes to round sums for sending."""
        return [
            sum(
                count * kind.shard(kind.plan.gradients) * (_FP32 + kind.wire.itemsize)
                for kind, count in unit.trainable
                if not kind.scattered
            )
            / max(1, sum(count for _, count in unit.trainable))
            for unit in self.units
        ]

    @cached_property
    def _settled(self) -> list[tuple[lanes.Step, ...]]:
        """Return by unit the wait of its forward: for the offloaded update of all units up to it."""
        beside = self.step.overlaps_parameters and not self.plan.lag
        numel, settled = 0, list[tuple[lanes.Step, ...]]()
        for unit in self.units:
            far = sum(kind.far * count for kind, count in unit.trainable)
            numel += far
            settled.append((lanes.AwaitChunks(numel),) if far and beside else ())
        return settled

    def _start(self, collective: PlannedCollective, count: int, steps: list[lanes.Step]) -> None:
        """Append ``count`` collectives, and their work on the device; adjacent equal ones are merged."""
        alike = collective.purpose, collective.verb, collective.axes, collective.nbytes
        if alike not in self._known:
            self._known[alike] = self._sent(collective)
        lane, link, seconds, beside_s = self._known[alike]
        if beside_s:
            steps.append(lanes.DeviceWork("element-wise", count * beside_s))
        key = _collective_key(collective.purpose, collective.unit)
        last = steps[-1] if steps else None
        if isinstance(last, lanes.LaneCollective) and (last.key, last.lane, last.link) == (key, lane, link):
            steps[-1] = last._replace(seconds=last.seconds + count * seconds, times=last.times + count)
        else:
            steps.append(
                lanes.LaneCollective(lane, link, key, count * seconds, count, collective.purpose.value, collective.unit)
            )

    def _sent(self, collective: PlannedCollective) -> tuple[str, str, float, float]:
        """Return the lane, link and seconds of a collective, and the seconds of its work on the device."""
        axes, channel = collective.axes, collective.purpose.channel
        everywhere = channel == "control" or collective.size >= self.mesh.data
        lane = channel if everywhere else f"{channel} over {'+'.join(self.mesh.sizes(axes))}"
        seconds = collective_s(self.cluster, self.mesh, collective.verb, axes, collective.nbytes)
        beside_s = elementwise_s(self.cluster.device, self._received(collective))
        return lane, find_link_name(self.cluster, self.mesh, axes), seconds, beside_s

    def _received(self, collective: PlannedCollective) -> float:
        """Return the bytes that a rank reads and writes for a collective in addition to sending.

        These are quantization and dequantization, and the addition of received sums.
        """
        precision = self.plan.precision
        if collective.verb == "all_to_all":
            bits = next((level.bits for axis in collective.axes if (level := precision.level_of(axis)).bits), 8)
            numel = collective.nbytes * 8 / bits
            return numel * _FP32 + 2 * collective.nbytes + 2 * _FP32 * numel / collective.size
        if collective.purpose is CollectivePurpose.GATHER and precision.gather_bits:
            itemsize = precision.parameter_of(torch.float32).itemsize
            numel = collective.nbytes * 8 / precision.gather_bits
            return itemsize * numel / collective.size + 2 * collective.nbytes + itemsize * numel
        if collective.verb == "reduce_scatter":
            itemsize = precision.wire_of(precision.parameter_of(torch.float32)).itemsize
            return collective.nbytes / itemsize / collective.size * (itemsize + 2 * _FP32)
        return 0.0

    def _elementwise(self, nbytes: float, steps: list[lanes.Step]) -> None:
        if nbytes:
            steps.append(lanes.DeviceWork("element-wise", elementwise_s(self.cluster.device, nbytes)))

    def _copy_s(self, link: str, nbytes: int) -> float:
        way = self.cluster.links[_LINKS[link]]
        return way.latency_s + nbytes / way.bytes_per_s

    def _chunks(self, repeat: RepeatMoves) -> lanes.ChunkPipeline | None:
        """Return the update of equal chunks; None if ``repeat`` repeats something else."""
        numel = sum(move.numel for move in repeat.moves if isinstance(move, HostUpdate))
        if not numel:
            return None
        kind = next(kind for unit in self.units for kind, _ in unit.trainable if kind.far)
        stages = []
        for move in repeat.moves:
            if isinstance(move, CopyBytes):
                stages.append((move.link, self._copy_s(move.link, move.nbytes)))
            elif isinstance(move, HostUpdate):
                stages.append(("update", self._far_update_s(kind, numel)))
        return lanes.ChunkPipeline(repeat.times, RING_SLOTS, tuple(stages), numel)

    def _far_update_s(self, kind: FlatKind, numel: int) -> float:
        """Return the seconds to update offloaded elements, on the host or by the device over the host link."""
        nbytes = numel * update_bytes(kind.plan.precision, kind.dtype, self.step.moments, clip=False)
        return nbytes / (self.cluster.links["host"].bytes_per_s if self.step.on_device else _HOST_BYTES_PER_S)


def _collective_key(purpose: CollectivePurpose, unit: int) -> int:
    """Return the key that identifies collectives of a unit and purpose."""
    return _COUNT * unit + _PURPOSES[purpose]


_PURPOSES = {purpose: i for i, purpose in enumerate(CollectivePurpose)}
_COUNT = len(_PURPOSES)


def unit_name(index: int) -> str:
    """Return the name of a unit in spans."""
    return f"blocks.{index - 1}" if index else "root"


def sum_lane_seconds(steps: Iterable[lanes.Step]) -> Totals:
    """Return the seconds of steps by resource; unit passes are not included."""
    totals: Totals = defaultdict(float)
    for step in steps:
        if isinstance(step, lanes.RepeatSteps):
            for key, seconds in sum_lane_seconds(step.steps).items():
                totals[key] += step.times * seconds
        elif isinstance(step, lanes.LaneCollective):
            totals["lane", step.lane] += step.seconds
            totals["link", step.link] += step.seconds
        elif isinstance(step, lanes.DeviceWork):
            totals["work", step.kind] += step.seconds
        elif isinstance(step, lanes.MemoryTransfer):
            totals["lane", step.lane] += step.seconds
        elif isinstance(step, lanes.ChunkPipeline):
            for lane, seconds in step.stages:
                totals["lane", lane] += step.times * seconds
    return totals
