"""Moves: the actions of one rank in a step, as data."""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import torch

from npuzero.plan.table.placement import Axes, Memory


class CollectivePurpose(enum.Enum):
    """Name the purpose of a collective: one of the four rules, or control traffic of the engine."""

    GATHER = "gather"  # R1
    REDUCE = "reduce"  # R2
    BOUNDARY = "boundary"  # R3
    RESTORE = "restore"  # R4
    VOTE = "vote"  # which parameters got gradients
    NORM = "norm"  # of the gradients

    __hash__ = object.__hash__  # as in Memory

    @property
    def channel(self) -> str:
        """Return its channel: collectives of one channel and group run in the order they start."""
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
        unit: index of the unit of the flat parameter; 0 for control.
        axes, size: the group's axes, and its number of ranks.
        nbytes: bytes of the unsharded buffer, size times the shard.
    """

    purpose: CollectivePurpose
    unit: int
    verb: str
    axes: Axes
    size: int
    nbytes: int


@dataclass(frozen=True)
class StepBuffer:
    """Describe a buffer that exists within a step.

    Attributes:
        label: part of the training state that it counts for.
        pool: channel and axes of the pool that lends it, by length and dtype, and keeps it after it is freed; None:
            allocated and freed each time.
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
    """Allocate ``count`` such buffers."""

    buffer: StepBuffer
    count: int = 1


@dataclass(frozen=True)
class FreeBuffer:
    """Free ``count`` such buffers."""

    buffer: StepBuffer
    count: int = 1


@dataclass(frozen=True)
class StartCollective:
    """Start ``count`` such collectives, one for each of ``count`` equal flat parameters."""

    collective: PlannedCollective
    count: int = 1


@dataclass(frozen=True)
class WaitCollective:
    """Wait for the first ``count`` running collectives of a unit and purpose; 0: none is running."""

    purpose: CollectivePurpose
    unit: int
    count: int = 1


@dataclass(frozen=True)
class LaunchReduction:
    """Begin the reduction of a flat parameter of ``unit``: its gradients are complete."""

    unit: int


@dataclass(frozen=True)
class CopyBytes:
    """Copy ``nbytes``, ``count`` times, from one memory of this rank to another.

    Attributes:
        link: source and destination: one of :data:`~npuzero.plan.prediction.report.LINKS`.
    """

    link: str
    nbytes: int
    count: int = 1


@dataclass(frozen=True)
class HostUpdate:
    """Update ``numel`` elements of a chunk on the host."""

    numel: int


@dataclass(frozen=True)
class RepeatMoves:
    """Repeat ``moves`` ``times`` times; each time leaves buffers and collectives as before."""

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
    """Yield the moves one by one, with repeats expanded."""
    for move in moves:
        if isinstance(move, RepeatMoves):
            for _ in range(move.times):
                yield from flatten_moves(move.moves)
        else:
            yield move


def record_moves(moves: list[Move], do: Callable[[], None]) -> tuple[Move, ...]:
    """Return the moves that ``do`` appends to ``moves``, and remove them from it."""
    begin = len(moves)
    do()
    made = tuple(moves[begin:])
    del moves[begin:]
    return made
