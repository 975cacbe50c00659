"""The words of a schedule: what a rank does in a step, as data."""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import torch

from npuzero.plan.table.placement import Axes, Memory


class CollectivePurpose(enum.Enum):
    """Say what a collective is for: one of the four rules, or what the engine says to itself."""

    GATHER = "gather"  # R1
    REDUCE = "reduce"  # R2
    BOUNDARY = "boundary"  # R3
    RESTORE = "restore"  # R4
    VOTE = "vote"  # which parameters took part
    NORM = "norm"  # of the gradients

    __hash__ = object.__hash__  # as Memory's

    @property
    def channel(self) -> str:
        """Return the channel it travels on: collectives of one channel and group run in the order in which they
        start.
        """
        return _CHANNELS[self]


_CHANNELS = {
    CollectivePurpose.GATHER: "gather",
    CollectivePurpose.RESTORE: "restore",
    CollectivePurpose.REDUCE: "reduce",
    CollectivePurpose.BOUNDARY: "reduce",
    CollectivePurpose.VOTE: "control",
    CollectivePurpose.NORM: "control",
}


@dataclass(frozen=True)
class PlannedCollective:
    """Run one collective over one buffer.

    Attributes:
        unit: index of the unit whose flat it moves; 0 for control.
        axes, size: the group, and its number of ranks.
        nbytes: of the unsharded buffer, size times the shard.
    """

    purpose: CollectivePurpose
    unit: int
    verb: str
    axes: Axes
    size: int
    nbytes: int


@dataclass(frozen=True)
class StepBuffer:
    """Describe memory that lives within a step.

    Attributes:
        label: the part of the training state it counts for.
        pool: lent from the pool of a channel and axes, by length and dtype, and when given back kept there for the next
            of its kind; None: it comes and goes.
    """

    memory: Memory
    label: str
    numel: int
    dtype: torch.dtype
    pool: tuple[str, Axes] | None = None

    @property
    def nbytes(self) -> int:
        return self.numel * self.dtype.itemsize


@dataclass(frozen=True)
class ComputePass:
    """Compute the forward of unit ``unit``, or its backward."""

    unit: int
    backward: bool


@dataclass(frozen=True)
class AllocateBuffer:
    """Take memory for ``count`` such buffers."""

    buffer: StepBuffer
    count: int = 1


@dataclass(frozen=True)
class FreeBuffer:
    """Give ``count`` such buffers back."""

    buffer: StepBuffer
    count: int = 1


@dataclass(frozen=True)
class StartCollective:
    """Start ``count`` such collectives, one for each of as many equal flats."""

    collective: PlannedCollective
    count: int = 1


@dataclass(frozen=True)
class WaitCollective:
    """Compute waits for the first ``count`` collectives under way of a unit and purpose; 0: all was there already."""

    purpose: CollectivePurpose
    unit: int
    count: int = 1


@dataclass(frozen=True)
class LaunchReduction:
    """Begin the reduction of a flat of ``unit``, whose gradients are complete."""

    unit: int


@dataclass(frozen=True)
class CopyBytes:
    """Copy ``nbytes``, ``count`` times, from one memory of this rank to another.

    Attributes:
        link: from where to where: one of :data:`~npuzero.plan.prediction.report.LINKS`.
    """

    link: str
    nbytes: int
    count: int = 1


@dataclass(frozen=True)
class HostUpdate:
    """Update ``numel`` elements of a chunk that is on the host."""

    numel: int


@dataclass(frozen=True)
class RepeatMoves:
    """Repeat ``moves`` ``times`` times; each time they leave all as they found it."""

    times: int
    moves: tuple[Move, ...]


Move = (
    ComputePass
    | AllocateBuffer
    | FreeBuffer
    | StartCollective
    | WaitCollective
    | LaunchReduction
    | CopyBytes
    | HostUpdate
    | RepeatMoves
)


def flatten_moves(moves: Iterable[Move]) -> Iterator[Move]:
    """Yield the moves one by one, repeats written out."""
    for move in moves:
        if isinstance(move, RepeatMoves):
            for _ in range(move.times):
                yield from flatten_moves(move.moves)
        else:
            yield move


def record_moves(moves: list[Move], do: Callable[[], None]) -> tuple[Move, ...]:
    """Return the moves that ``do`` adds to ``moves``, and take them out again."""
    begin = len(moves)
    do()
    made = tuple(moves[begin:])
    del moves[begin:]
    return made
