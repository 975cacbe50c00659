"""Schedules of a pipeline as pure data: the order in which each rank runs its stages, and a simulation.

A pipeline has p ranks with v chunks each, so S = p * v stages; stage s is on rank s % p. A step has m micro-batches. A
schedule is a table with a row of actions for each rank. A rank runs its row from left to right, each action as soon as
its inputs have arrived; nothing else decides the order.

===========  =============================================  ==================  ========================================
name         bubble, of the makespan                        peak of rank r      source
===========  =============================================  ==================  ========================================
gpipe        (p-1) / (m+p-1)                                m                   Huang et al. 2019
1f1b         (p-1) / (m+p-1)                                min(m, p-r)         Narayanan et al. 2021, section 2.2
interleaved  (p-1) / (v*m+p-1)                              min(v*m, 2(p-r-1)   the same
                                                            + (v-1)p + 1)
zero-bubble  (p-1) / (3*m+p-1), from m = p on               min(m, p)           Qi et al. 2023, section 2.1: ZB-H1
===========  =============================================  ==================  ========================================

Bubbles assume a forward of time 1, a backward of time 2 (half of it for the weights) and free sends. Tests check every
formula exactly.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Container, Iterable, Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from typing import NamedTuple

from npuzero.arguments import check_count
from npuzero.errors import ConfigError, did_you_mean

NAMES = ("gpipe", "1f1b", "interleaved", "zero-bubble")

#: Seconds, or any other unit of time.
Time = Fraction | float


class StageAction(NamedTuple):
    """Name one uninterrupted computation: the forward or backward of one stage for one micro-batch.

    Attributes:
        kind: ``"F"`` forward, ``"B"`` backward. A split backward has ``"I"``, the input gradients, which the previous
            stage waits for, and ``"W"``, the weight gradients, which no stage waits for.
        stage: 0 .. S-1.
        micro: the micro-batch, 0 .. m-1.
    """

    kind: str
    stage: int
    micro: int


class TimedAction(NamedTuple):
    """Record when a rank ran an action, or would run it.

    Attributes:
        rank: along the pipeline.
        act: the action.
        begin, end: in one unit for all of a timeline.
    """

    rank: int
    act: StageAction
    begin: Time
    end: Time


@dataclass(frozen=True)
class ScheduleTimeline:
    """Hold the times of a step's actions, simulated by ``simulate`` or measured.

    Attributes:
        acts: each rank's actions, in the order in which it runs them.
    """

    acts: tuple[TimedAction, ...]

    @cached_property
    def rows(self) -> tuple[tuple[TimedAction, ...], ...]:
        """Return each rank's actions."""
        ranks = range(1 + max(timed.rank for timed in self.acts))
        return tuple(tuple(timed for timed in self.acts if timed.rank == rank) for rank in ranks)

    @property
    def makespan(self) -> Time:
        """Return the time from the start of the first action to the end of the last one."""
        return max(timed.end for timed in self.acts) - min(timed.begin for timed in self.acts)

    @property
    def busy(self) -> tuple[Time, ...]:
        """Return for how long each rank computes."""
        return tuple(sum(timed.end - timed.begin for timed in row) for row in self.rows)

    @property
    def bubble(self) -> Fraction:
        """Return the idle fraction of the makespan over all ranks; exact if the times are."""
        return 1 - sum(Fraction(busy) for busy in self.busy) / (len(self.rows) * Fraction(self.makespan))

    @property
    def peak(self) -> tuple[int, ...]:
        """Return the peak of each rank, as ``PipelineSchedule.peak`` counts it."""
        return tuple(_count_peak_forwards(timed.act for timed in row) for row in self.rows)


@dataclass(frozen=True)
class PipelineSchedule:
    """Hold the order in which each rank of a pipeline runs its actions.

    Attributes:
        name: one of ``NAMES``.
        ranks: along the pipeline, p.
        micro_batches: in a step, m.
        chunks: stages on each rank, v.
        table: a row of actions for each rank.
    """

    name: str
    ranks: int
    micro_batches: int
    chunks: int
    table: tuple[tuple[StageAction, ...], ...]

    @property
    def stages(self) -> int:
        """Return the number of stages on all ranks."""
        return self.ranks * self.chunks

    def row(self, rank: int) -> tuple[StageAction, ...]:
        """Return the actions of ``rank``."""
        return self.table[rank]

    def needs(self, act: StageAction) -> tuple[StageAction, ...]:
        """Return the actions, on any rank, that must end before ``act`` can begin."""
        kind, stage, micro = act
        if kind == "F":
            return (StageAction("F", stage - 1, micro),) if stage else ()
        if kind == "W":
            return (StageAction("I", stage, micro),)
        last = stage == self.stages - 1
        return (StageAction("F", stage, micro), *(() if last else (StageAction(kind, stage + 1, micro),)))

    def peak(self, rank: int) -> int:
        """Return the most forwards of ``rank`` alive at once: begun, and their backward not finished.

        Each is a micro-batch in one stage with stored activations.
        """
        return _count_peak_forwards(self.table[rank])

    @cached_property
    def bubble(self) -> Fraction:
        """Return the idle fraction of a step when a backward takes as long as two forwards."""
        return simulate(self).bubble


#: Forwards in the largest table that may be made.
_MOST_ACTS = 1 << 22


def schedule(name: str, ranks: int, micro_batches: int, chunks: int = 1) -> PipelineSchedule:
    """Return the schedule called ``name``.

    Args:
        name: one of ``NAMES``. ``interleaved`` with one chunk on each rank returns ``1f1b``.
        ranks: along the pipeline.
        micro_batches: in a step; ``interleaved`` needs a multiple of ``ranks``.
        chunks: stages on each rank; more than one for ``interleaved`` only.

    Raises:
        ConfigError: there is no such schedule, or not for these numbers.
    """
    for what, number in (("ranks", ranks), ("micro_batches", micro_batches), ("chunks", chunks)):
        check_count(f"schedule: {what}", number, f"Give the number of {what.replace('_', '-')}.")
    if ranks * micro_batches * chunks > _MOST_ACTS:
        raise ConfigError(
            "schedule",
            expected=f"at most {_MOST_ACTS:,} forwards in a step, over all ranks",
            got=f"{ranks} ranks x {micro_batches} micro-batches x {chunks} chunks",
            do="Use fewer micro-batches; each may have more samples.",
        )
    _check_schedule(name, ranks, micro_batches, chunks)
    if chunks == 1 and name == "interleaved":
        name = "1f1b"
    table = tuple(tuple(_rank_actions(name, rank, ranks, micro_batches, chunks)) for rank in range(ranks))
    return PipelineSchedule(name, ranks, micro_batches, chunks, table)


def simulate(
    schedule: PipelineSchedule, forward: Time = 1, backward: Time = 2, weights: Time | None = None
) -> ScheduleTimeline:
    """Return the time of each action if each begins as soon as its rank is free and its inputs are ready.

    Sends are free and all stages take equally long. Times are sums of the given ones, so they are exact if those are.

    Args:
        schedule: the actions of each rank, in order.
        forward: time of an ``F``.
        backward: time of a ``B``, or of an ``I`` and a ``W`` together.
        weights: time of a ``W``; None: half of ``backward``.

    Raises:
        ConfigError: a time is negative, all times are 0, or the schedule deadlocks: each rank waits for an action that
            comes later in a row.
    """
    takes = _action_durations(forward, backward, weights)
    left = [deque(row) for row in schedule.table]
    free: list[Time] = [0] * len(left)
    ended: dict[StageAction, Time] = {}
    acts: list[TimedAction] = []
    moved = True
    while moved:
        moved = False
        for rank, row in enumerate(left):
            while row and all(need in ended for need in schedule.needs(row[0])):
                act = row.popleft()
                begin = max([free[rank], *(ended[need] for need in schedule.needs(act))])
                free[rank] = ended[act] = begin + takes[act.kind]
                acts.append(TimedAction(rank, act, begin, free[rank]))
                moved = True
    if any(left):
        raise _deadlock_error(schedule, left, ended)
    return ScheduleTimeline(tuple(acts))


def _check_schedule(name: str, ranks: int, micro_batches: int, chunks: int) -> None:
    """Refuse an unknown schedule, or numbers that it does not support."""
    if not isinstance(name, str) or name not in NAMES:
        known = ", ".join(NAMES)
        raise ConfigError(
            "schedule", expected=f"one of {known}", got=repr(name), do=did_you_mean(name, NAMES, "Choose one.")
        )
    if chunks > 1 and name != "interleaved":
        raise ConfigError(
            f"schedule {name!r}",
            expected="chunks=1: it has one stage on each rank",
            got=f"chunks={chunks}",
            do='Use "interleaved", or leave chunks out.',
        )
    if chunks > 1 and micro_batches % ranks:
        more = micro_batches + ranks - micro_batches % ranks
        raise ConfigError(
            "schedule 'interleaved'",
            expected=f"a number of micro-batches that its {ranks} ranks divide",
            got=f"{micro_batches}",
            do=f'Use {more} micro-batches; "1f1b" takes any number.',
        )


def _rank_actions(name: str, rank: int, ranks: int, micro_batches: int, chunks: int) -> Iterable[StageAction]:
    """Return the actions of a rank.

    Schedules differ in the number of forwards before the first backward; zero-bubble also splits each backward.
    """
    warm = {
        "gpipe": micro_batches,
        "1f1b": ranks - rank - 1,
        "interleaved": 2 * (ranks - rank - 1) + (chunks - 1) * ranks,
        "zero-bubble": ranks - rank - 1,
    }[name]
    # A chunk runs as many micro-batches in a row as there are ranks, because then the first one has come around.
    groups = [range(first, min(first + ranks, micro_batches)) for first in range(0, micro_batches, ranks)]
    stages = range(rank, ranks * chunks, ranks)
    forwards = [StageAction("F", stage, micro) for group in groups for stage in stages for micro in group]
    backwards = [StageAction("B", stage, micro) for group in groups for stage in reversed(stages) for micro in group]
    row = _alternate_actions(forwards, backwards, min(warm, len(forwards)))
    return _split_backwards(row, late=rank) if name == "zero-bubble" else row


def _alternate_actions(
    forwards: Sequence[StageAction], backwards: Sequence[StageAction], warm: int
) -> list[StageAction]:
    """Return ``warm`` forwards, then one forward and one backward in turn, then the remaining backwards."""
    pairs = zip(forwards[warm:], backwards, strict=False)
    steady = [act for pair in pairs for act in pair]
    return [*forwards[:warm], *steady, *backwards[len(forwards) - warm :]]


def _split_backwards(row: Iterable[StageAction], late: int) -> Iterator[StageAction]:
    """Split each backward in two, with weight gradients ``late`` micro-batches after input gradients.

    A rank with fewer warm-up forwards than the first rank may hold as many micro-batches. So it delays that many weight
    gradients: earlier ranks get input gradients sooner, and the delayed work fills the end of the step.
    """
    waiting: deque[StageAction] = deque()
    for act in row:
        if act.kind == "F":
            yield act
            continue
        yield act._replace(kind="I")
        waiting.append(act._replace(kind="W"))
        if len(waiting) > late:
            yield waiting.popleft()
    yield from waiting


def _count_peak_forwards(acts: Iterable[StageAction]) -> int:
    """Return the most forwards alive at once: begun, and their backward not finished."""
    alive = most = 0
    for act in acts:
        alive += {"F": 1, "B": -1, "I": 0, "W": -1}[act.kind]
        most = max(most, alive)
    return most


def _action_durations(forward: Time, backward: Time, weights: Time | None) -> dict[str, Time]:
    """Return the time of an action of each kind."""
    later = backward / 2 if weights is None else weights
    takes = {"F": forward, "B": backward, "I": backward - later, "W": later}
    if min(takes.values()) < 0 or max(takes.values()) == 0:
        raise ConfigError(
            "simulate",
            expected="times of at least 0, not all of them 0, and weights at most backward",
            got=f"forward={forward}, backward={backward}, weights={weights}",
            do="Give how long an act takes, in any unit.",
        )
    return takes


def _deadlock_error(
    schedule: PipelineSchedule, left: Sequence[Sequence[StageAction]], ended: Container[StageAction]
) -> ConfigError:
    """Return an error that names the action that each unfinished rank waits for."""
    waits = []
    for rank, row in enumerate(left):
        if row:
            needs = ", ".join(_format_action(need) for need in schedule.needs(row[0]) if need not in ended)
            waits.append(f"rank {rank} at {_format_action(row[0])} for {needs}")
    return ConfigError(
        f"schedule {schedule.name!r}",
        expected="a table in which each act finds what it takes",
        got=f"a deadlock: {'; '.join(waits)}",
        do="Order the acts of each rank so that none stands before one that it waits for.",
    )


def _format_action(act: StageAction) -> str:
    return f"{act.kind} of stage {act.stage} #{act.micro}"
