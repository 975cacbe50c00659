"""The steady step of a model under a plan: flats and moves, which memory, bytes and time are all read from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from npuzero.config import Settings
from npuzero.plan import FlatSize, MeshShape, Plan, Report, steady_step
from npuzero.plan.moves import Move
from npuzero.plan.predict import report_of
from npuzero.plan.schedule import Step
from npuzero.planner.models import ModelShape
from npuzero.shard.build import steady_of

#: Micro-batches of a step that stands for all with several: the first, one of those that are alike, and the last.
_PASSES = 3


def passes_of(micro_batches: int) -> int:
    """Return the micro-batches of the step that stands for one with so many."""
    return 1 if micro_batches == 1 else _PASSES


@dataclass(frozen=True)
class Steady:
    """Hold one rank's step of one micro-batch, or one that stands for all with several.

    Attributes:
        flats, plan, mesh, step: what it is a step of, and how that is run.
        moves: in their order.
    """

    flats: Sequence[FlatSize]
    plan: Plan
    mesh: MeshShape
    step: Step
    moves: Sequence[Move]

    @property
    def report(self) -> Report:
        """Return what the rank holds and sends; what it holds is the same with any number of several micro-batches."""
        return report_of(self.plan, self.flats, self.mesh, self.step.moments, self.moves)


@lru_cache(maxsize=4)
def steady(model: ModelShape, plan: Plan, mesh: MeshShape, settings: Settings, passes: int, clip: bool) -> Steady:
    """Return the step of a rank that has all of ``model``, kept for whoever asks next.

    Args:
        passes: :func:`passes_of` its micro-batches.
    """
    flats, step = steady_of(model.units, plan, mesh, settings, spans=model.spans, micro_batches=passes, clip=clip)
    return Steady(flats, plan, mesh, step, steady_step(flats, plan, mesh, step))
