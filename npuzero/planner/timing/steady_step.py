"""The steady step of a model under a plan: flats and moves, which memory, bytes and time are all read from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from npuzero.config import Settings
from npuzero.plan import FlatSize, MeshShape, Plan, Report, steady_step
from npuzero.plan.prediction.predict import build_report
from npuzero.plan.prediction.step_schedule import StepSpec
from npuzero.plan.table.step_moves import Move
from npuzero.planner.models import ModelShape
from npuzero.shard.build import build_steady_step

#: Micro-batches of a step that stands for all with several: the first, one of those that are alike, and the last.
_PASSES = 3


def count_modelled_passes(micro_batches: int) -> int:
    """Return the micro-batches of the step that stands for one with so many."""
    return 1 if micro_batches == 1 else _PASSES


@dataclass(frozen=True)
class SteadyStep:
    """Hold one rank's step of one micro-batch, or one that stands for all with several.

    Attributes:
        flats, plan, mesh, step: what it is a step of, and how that is run.
        moves: in their order.
    """

    flats: Sequence[FlatSize]
    plan: Plan
    mesh: MeshShape
    step: StepSpec
    moves: Sequence[Move]

    @property
    def report(self) -> Report:
        """Return what the rank holds and sends; what it holds is the same with any number of several micro-batches."""
        return build_report(self.plan, self.flats, self.mesh, self.step.moments, self.moves)


@lru_cache(maxsize=4)
def get_steady_step(
    model: ModelShape, plan: Plan, mesh: MeshShape, settings: Settings, passes: int, clip: bool
) -> SteadyStep:
    """Return the step of a rank that has all of ``model``, kept for whoever asks next.

    Args:
        passes: :func:`count_modelled_passes` its micro-batches.
    """
    flats, step = build_steady_step(
        model.units, plan, mesh, settings, spans=model.spans, micro_batches=passes, clip=clip
    )
    return SteadyStep(flats, plan, mesh, step, steady_step(flats, plan, mesh, step))
