"""Peak memory of one rank: the bytes of a prediction together with activations.

A prediction gives the peak of each part of a training state. These peaks occur at different times: logits exist before
there are gradients, and a block's activations when later blocks' activations have already become gradients. So the
moves of the schedule (:func:`npuzero.plan.prediction.step_schedule.steady_step`) are followed together with the
stretches of a pass (:class:`npuzero.planner.model_work.units.ActivationStretch`), and their sum is taken at each move.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Sequence
from dataclasses import replace

from npuzero.plan import Memory, Placement, Report
from npuzero.plan.table.step_moves import (
    AllocateBuffer,
    ComputePass,
    FreeBuffer,
    LaunchReduction,
    Move,
    StepBuffer,
    flatten_moves,
)
from npuzero.planner.hardware.cluster import Cluster
from npuzero.planner.model_work.job import TrainingJob, TrainingRun
from npuzero.planner.model_work.units import ActivationStretch, ModelWorkload
from npuzero.planner.timing.steady_step import count_modelled_passes, get_steady_step

#: Blocks with offloaded inputs on the device at a time: one in transfer, and one in use.
_ON_THE_WAY = 2


def activation_bytes(work: ModelWorkload, recompute: bool = False) -> int:
    """Return the peak bytes of activations in one pass, including gradients that are not packed yet.

    Args:
        work: work of a micro-batch.
        recompute: whether blocks keep only their inputs.

    Example::

        from npuzero.planner.timing.memory import activation_bytes
        from npuzero.planner.model_work.units import measure_workload

        work = measure_workload(npuzero.planner.from_size(7 * 10**9), sequence=4096)
        print(activation_bytes(work), activation_bytes(work, recompute=True))
    """
    return _peak_of_stretches(work.recomputed if recompute else work.kept)


def _peak_of_stretches(stretches: Iterable[ActivationStretch]) -> int:
    now = peak = 0
    for stretch in stretches:
        peak = max(peak, now + stretch.peak_bytes)
        now += stretch.left_bytes
    return peak


def least_activations(run: TrainingRun, work: ModelWorkload) -> int:
    """Return a lower bound of a rank's activation bytes; for a pipeline, of the first rank."""
    if run.plan.activations != Placement():
        return 0
    stretches = _divide_stretches(work.recomputed if run.recompute else work.kept, run)
    return _peak_of_stretches(stretches) if run.mesh.pipe == 1 else _pipeline_activation_bytes(stretches, run, 0)


def is_cpu(cluster: Cluster) -> bool:
    """Return whether a cluster's devices are CPUs, as its name indicates."""
    return cluster.name.split()[0] == "cpu"


def estimate_memory(
    job: TrainingJob, run: TrainingRun, report: Report, work: ModelWorkload, rank: int = 0
) -> dict[str, int]:
    """Return the peak bytes of a rank in a steady step, by memory (the values of :class:`~npuzero.plan.Memory`).

    The device's peak is that of the sum of stored bytes, buffers of the schedule, and activations. On a CPU gradients
    keep their pages from step to step; elsewhere they make room for the next forward. Tensor ranks divide a block's
    activations as in Korthikanti et al. (arXiv:2205.05198, equations 2 and 4); sequence ranks divide all of them.

    Rank r of p pipeline ranks holds the activations of the p - r micro-batches in flight under 1F1B, or of all if there
    are fewer, plus the largest workspace of any unit while states are at their peak: an upper bound.

    Args:
        report: report of this run from :meth:`npuzero.planner.ModelShape.predict`; for a pipeline that of ``rank`` from
            :meth:`npuzero.planner.model_work.stages.StagedModel.reports`.
        work: work of ``run.micro_batch`` sequences.
        rank: rank of the pipeline.
    """
    held = dict(report.memory)
    stretches = _divide_stretches(work.recomputed if run.recompute else work.kept, run)
    inputs = sum(s.left_bytes for s in stretches if s.unit and not s.backward) if run.recompute else 0
    where = run.plan.activations
    parts = run.mesh.size(where.axes)
    if inputs and (where.far or parts > 1):
        stretches = _offload_stretches(stretches, 0 if where.far else 1 / parts)
        if where.far:
            held[where.memory.value] += inputs // parts
    if run.mesh.pipe > 1:
        held[Memory.DEVICE.value] += _pipeline_activation_bytes(stretches, run, rank)
        return held
    moves = get_steady_step(
        job.model, run.plan, run.mesh, run.settings, count_modelled_passes(run.micro_batches), job.clip
    ).moves
    tide = _ActivationPeaks(stretches, on_cpu=is_cpu(job.cluster))
    tide.walk(flatten_moves(moves))
    if tide.stays:
        tide.walk(flatten_moves(moves))  # a second step starts with the buffers that the first one keeps
    labels = report.held[Memory.DEVICE]
    # Memory that never changes within a step: the total of all labels less the peaks of the allocated ones.
    resting = sum(labels.values()) - sum(tide.highest.values())
    held[Memory.DEVICE.value] = resting + tide.peak
    return held


class _ActivationPeaks:
    """Follow the moves of a step with the stretches of its passes, and record the peak of their sum on the device.

    Attributes:
        peak: the peak of the sum.
        highest: peak of the allocated buffers, by label.
        stays: labels of buffers that keep their memory after they are freed.
    """

    def __init__(self, stretches: Sequence[ActivationStretch], on_cpu: bool) -> None:
        self.peak = 0
        self.highest: Counter[str] = Counter()
        self._now: Counter[str] = Counter()
        self._stretches = stretches
        self._ahead: deque[ActivationStretch] = deque()
        self.stays = ("gradients",) if on_cpu else ()
        self._live = self._unpacked = 0
        self._begun: ComputePass | None = None

    def walk(self, moves: Iterable[Move]) -> None:
        for move in moves:
            if self._begun is not None and not (isinstance(move, AllocateBuffer) and move.buffer.label == "gradients"):
                self._compute(self._begun)
                self._begun = None
            if isinstance(move, ComputePass):
                self._begun = move
            elif isinstance(move, AllocateBuffer):
                self._take(move.buffer, move.count)
            elif isinstance(move, FreeBuffer):
                self._give(move.buffer, move.count)
            elif isinstance(move, LaunchReduction):
                self._unpacked = 0
        self._play_all()

    def _compute(self, move: ComputePass) -> None:
        """Run the stretches of the root before the unit's forward or backward, and then the unit's."""
        self._unpacked = 0
        if not move.unit and not move.backward:  # a new pass
            self._play_all()
            self._ahead.extend(self._stretches)
        while self._ahead:
            stretch = self._ahead.popleft()
            self._play(stretch)
            if (stretch.unit, stretch.backward) == (move.unit, move.backward):
                break

    def _play_all(self) -> None:
        while self._ahead:
            self._play(self._ahead.popleft())

    def _play(self, stretch: ActivationStretch) -> None:
        self._reach(stretch.peak_bytes)
        self._live += stretch.left_bytes
        self._unpacked = stretch.gradient_bytes

    def _take(self, buffer: StepBuffer, count: int) -> None:
        if self._ahead and not self._ahead[0].unit and not self._ahead[0].backward:  # the root's, after the blocks
            self._play(self._ahead.popleft())
        if buffer.memory is Memory.DEVICE and buffer.pool is None:
            self._now[buffer.label] += count * buffer.nbytes
            self.highest[buffer.label] = max(self.highest[buffer.label], self._now[buffer.label])
        self._reach(0)

    def _give(self, buffer: StepBuffer, count: int) -> None:
        if buffer.memory is Memory.DEVICE and buffer.pool is None:
            self._now[buffer.label] -= count * buffer.nbytes

    def _reach(self, more: int) -> None:
        taken = sum(self.highest[label] if label in self.stays else nbytes for label, nbytes in self._now.items())
        self.peak = max(self.peak, taken + self._live + self._unpacked + more)


def _divide_stretches(stretches: Sequence[ActivationStretch], run: TrainingRun) -> tuple[ActivationStretch, ...]:
    """Return the stretches of one tensor and sequence rank."""
    t, q = run.mesh.tensor, run.mesh.sequence
    if t * q == 1:
        return tuple(stretches)
    # Of 34 bytes per element of a block, tensor ranks divide 24 and replicate 10.
    blocks = (10 + 24 / t) / 34

    def cut(stretch: ActivationStretch) -> ActivationStretch:
        share = (blocks if stretch.unit else 1) / q
        return replace(
            stretch,
            peak_bytes=int(stretch.peak_bytes * share),
            left_bytes=int(stretch.left_bytes * share),
            gradient_bytes=int(stretch.gradient_bytes / t),
        )

    return tuple(map(cut, stretches))


def _offload_stretches(stretches: Sequence[ActivationStretch], share: float) -> tuple[ActivationStretch, ...]:
    """Return the stretches if only a fraction ``share`` of recomputation's inputs stays on the device."""
    inputs: Counter[int] = Counter()
    for stretch in stretches:
        if stretch.unit and not stretch.backward:
            inputs[stretch.unit] += stretch.left_bytes
    # Offloaded inputs leave the device at the end of forward and return for backward, so backward frees less there.
    gone = {unit: int(nbytes * (1 - share)) for unit, nbytes in inputs.items()}
    most = _ON_THE_WAY * max(inputs.values())
    moved = []
    for stretch in stretches:
        if stretch.unit:
            left = stretch.left_bytes + (gone[stretch.unit] if stretch.backward else -gone[stretch.unit])
            stretch = replace(stretch, left_bytes=left, peak_bytes=stretch.peak_bytes + most)
        moved.append(stretch)
    return tuple(moved)


def _pipeline_activation_bytes(stretches: Sequence[ActivationStretch], run: TrainingRun, rank: int) -> int:
    """Return the activations of a pipeline rank: of micro-batches in flight, and the largest unit workspace."""
    ranks, first = run.mesh.pipe, stretches[0]  # first: the root's, the input of the first block
    kept = [s.left_bytes for s in stretches if s.unit and not s.backward]
    # The last rank may have fewer blocks; the largest number is assumed, since this is an upper bound.
    blocks = -(-len(kept) // ranks) / len(kept)
    under_way = min(ranks - rank, run.micro_batches)
    here = [s for s in stretches if s.unit or rank == ranks - 1 or (s is first and not rank)]
    beside = max(s.peak_bytes - max(0, s.left_bytes) for s in here)
    return int((sum(kept) * blocks + first.left_bytes) * under_way) + beside
