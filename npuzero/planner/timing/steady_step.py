"""Steady step of a model under a plan: flat parameters and moves, the source of memory, bytes and time."""

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

#: Micro-batches of the representative step for several: the first, one of the equal middle ones, and the last.
_PASSES = 3


def count_modelled_passes(micro_batches: int) -> int:
    """Return the number of micro-batches of the step that represents one with ``micro_batches``."""
    return 1 if micro_batches == 1 else _PASSES


@dataclass(frozen=True)
class SteadyStep:
    """Hold one rank's step with one micro-batch, or the representative step for several.

    Attributes:
        flats, plan, mesh, step: flat parameters, plan, mesh sizes and settings of the step.
        moves: its moves in order.
    """

    flats: Sequence[FlatSize]
    plan: Plan
    mesh: MeshShape
    step: StepSpec
    moves: Sequence[Move]

    @property
    def report(self) -> Report:
        """Return the bytes held and sent; held bytes are the same for every number of micro-batches above one."""
        return build_report(self.plan, self.flats, self.mesh, self.step.moments, self.moves)


@lru_cache(maxsize=4)
def get_steady_step(
    model: ModelShape, plan: Plan, mesh: MeshShape, settings: Settings, passes: int, clip: bool
) -> SteadyStep:
    """Return the step of a rank that has all of ``model``; the last few results are cached.

    Args:
        passes: micro-batches, as :func:`count_modelled_passes` returns them.
    """
    flats, step = build_steady_step(
        model.units, plan, mesh, settings, spans=model.spans, micro_batches=passes, clip=clip
    )
    return SteadyStep(flats, plan, mesh, step, steady_step(flats, plan, mesh, step))
