"""Prediction of the bytes one rank holds and sends in a step: the sum of its schedule, and storage between steps."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence

import torch

from npuzero.plan.prediction.report import LABELS, LINKS, Report, Sent, sent_by_axis, sent_by_verb
from npuzero.plan.prediction.step_schedule import StepSpec, steady_step
from npuzero.plan.presets import Plan
from npuzero.plan.sizes.flat_sizes import FlatKind, FlatSize
from npuzero.plan.table.mesh_shape import MeshShape, axis_bytes
from npuzero.plan.table.placement import Memory
from npuzero.plan.table.step_moves import (
    AllocateBuffer,
    CopyBytes,
    FreeBuffer,
    Move,
    PlannedCollective,
    RepeatMoves,
    StartCollective,
    StepBuffer,
)

#: A memory space, and a part of the training state.
Where = tuple[Memory, str]


def predict_bytes(plan: Plan, flats: Sequence[FlatSize], mesh: MeshShape, step: StepSpec) -> Report:
    """Return the bytes one rank holds and sends in one steady step.

    Args:
        plan, flats, mesh: the model's plan, its flat parameters in order of their units, and the sizes of the mesh.
        step: settings of the step.
    """
    return build_report(plan, flats, mesh, step.moments, steady_step(flats, plan, mesh, step))


def build_report(plan: Plan, flats: Sequence[FlatSize], mesh: MeshShape, moments: int, moves: Sequence[Move]) -> Report:
    """Return the report of :func:`predict_bytes` for given ``moves``."""
    held: dict[Memory, dict[str, int]] = {Memory.DEVICE: dict.fromkeys(LABELS, 0)}
    for (memory, label), nbytes in (resting_bytes(flats, plan, mesh, moments) + peak_step_bytes(moves)).items():
        held.setdefault(memory, dict.fromkeys(LABELS, 0))[label] += nbytes
    sent, control = Sent(), Sent()
    for collective, times in iter_collectives(moves):
        counter = control if collective.purpose.channel == "control" else sent
        for axis, nbytes in axis_bytes(collective.verb, collective.nbytes, mesh.sizes(collective.axes)).items():
            counter[axis, collective.verb] += times * nbytes
    moved = Counter(dict.fromkeys(LINKS, 0))
    for copy, times in iter_copies(moves):
        moved[copy.link] += times * copy.nbytes
    by_verb = sent_by_verb(sent, control.total())
    return Report(held, by_verb, plan, mesh.world, dict(moved), sent_by_axis(sent))


def iter_collectives(moves: Iterable[Move]) -> Iterator[tuple[PlannedCollective, int]]:
    """Yield each collective of a schedule, and how often it runs."""
    for move in moves:
        if isinstance(move, StartCollective):
            yield move.collective, move.count
        elif isinstance(move, RepeatMoves):
            yield from ((collective, move.times * times) for collective, times in iter_collectives(move.moves))


def iter_copies(moves: Iterable[Move]) -> Iterator[tuple[CopyBytes, int]]:
    """Yield each copy of a schedule, and how often it runs."""
    for move in moves:
        if isinstance(move, CopyBytes):
            yield move, move.count
        elif isinstance(move, RepeatMoves):
            yield from ((copy, move.times * times) for copy, times in iter_copies(move.moves))


def resting_bytes(flats: Iterable[FlatSize], plan: Plan, mesh: MeshShape, moments: int) -> Counter[Where]:
    """Return the bytes stored between steps: parameters, masters, moments, and gradient buffers on the host.

    Delayed updates add a second gradient buffer and the updated parameters, on the host.
    """
    held: Counter[Where] = Counter()
    for flat, equal in itertools.groupby(flats):
        kind, count = FlatKind.of(flat, plan, mesh), sum(1 for _ in equal)
        own, precision = kind.plan, kind.plan.precision
        held[own.parameters.memory, "parameters"] += count * kind.shard(own.parameters) * flat.dtype.itemsize
        if flat.trainable:
            for memory, numel in ((Memory.DEVICE, kind.near), (own.states.memory, kind.far)):
                states = moments * precision.moment_bytes(numel) + numel * precision.master_bytes(flat.dtype)
                held[memory, "states"] += count * states
            held[Memory.DEVICE, "states"] += count * kind.levels.residuals * torch.float32.itemsize
            if own.gradients.far:
                held[own.gradients.memory, "gradients"] += count * kind.gradient.nbytes * (1 + own.lag)
            held[Memory.HOST, "states"] += count * own.lag * kind.far * flat.dtype.itemsize
    return held


def peak_step_bytes(moves: Iterable[Move]) -> Counter[Where]:
    """Return the peak bytes of buffers within a step."""
    tide = _BufferPeaks()
    tide.walk(moves)
    return tide.peak + tide.pooled


class _BufferPeaks:
    """Count allocated bytes and their peak, and separately the bytes of pooled buffers, which pools never free."""

    def __init__(self) -> None:
        self.now: Counter[Where] = Counter()
        self.peak: Counter[Where] = Counter()
        self.pooled: Counter[Where] = Counter()
        self._idle: Counter[StepBuffer] = Counter()

    def walk(self, moves: Iterable[Move]) -> None:
        for move in moves:
            if isinstance(move, AllocateBuffer):
                self._take(move.buffer, move.count)
            elif isinstance(move, FreeBuffer):
                self._give(move.buffer, move.count)
            elif isinstance(move, RepeatMoves):  # each repetition has the same peak
                self.walk(move.moves)

    def _take(self, buffer: StepBuffer, count: int) -> None:
        where = buffer.memory, buffer.label
        if buffer.pool is not None:
            made = max(0, count - self._idle[buffer])
            self._idle[buffer] -= count - made
            self.pooled[where] += made * buffer.nbytes
        else:
            self.now[where] += count * buffer.nbytes
            self.peak[where] = max(self.peak[where], self.now[where])

    def _give(self, buffer: StepBuffer, count: int) -> None:
        if buffer.pool is not None:
            self._idle[buffer] += count
        else:
            self.now[buffer.memory, buffer.label] -= count * buffer.nbytes
