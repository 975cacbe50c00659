"""``npuzero plan``: the model divided into pipeline stages, each rank's share, and the schedule."""

from __future__ import annotations

import argparse
from dataclasses import dataclass, field
from typing import Any

from npuzero.cli.arguments import parse_number
from npuzero.config import Settings
from npuzero.errors import ConfigError
from npuzero.parallel.pipeline_parallel.schedule import NAMES, PipelineSchedule, schedule
from npuzero.plan import MeshShape, Plan, Report
from npuzero.planner.model_work.stages import StagedModel, held_bytes
from npuzero.planner.models import ModelShape


def add_pipe_options(axes: Any) -> None:
    """Add the options of pipeline stages and their schedule."""
    axes.add_argument(
        "--pipe", type=parse_number, default=1, metavar="N", help="ranks of a pipeline (1; docs/pipeline.md)"
    )
    axes.add_argument("--schedule", choices=NAMES, help="of the pipeline (1f1b)")
    axes.add_argument(
        "--chunks", type=parse_number, metavar="N", help="stages of each rank, with --schedule interleaved (1)"
    )


@dataclass(frozen=True)
class PipelineModel:
    """Predict a model over the ranks of a pipeline. Reports are of the rank that holds most.

    Attributes:
        staged: the stages of each rank.
        schedule: the order in which each rank runs them.
        edge_bytes: bytes per rank of a micro-batch's activations between stages.
        memory_bytes: of a rank; None if not given.
        ranks: the report of each rank, by plan; filled by ``predict``.
    """

    staged: StagedModel
    schedule: PipelineSchedule
    edge_bytes: int
    memory_bytes: int | None
    ranks: dict[str, list[Report]] = field(default_factory=dict)

    def predict(self, plan: Plan, mesh: MeshShape, settings: Settings, clip: bool) -> Report:
        """Return the report of the rank that holds most on its device."""
        own = self.staged.as_trained(plan, mesh, settings, self.schedule, clip, self.memory_bytes)
        found = [*self.staged.reports(own, mesh, settings, self.schedule, clip, self.edge_bytes).values()]
        self.ranks[plan.name] = found
        return max(found, key=held_bytes)

    def told(self) -> str:
        """Describe the schedule: bubble, micro-batches alive, and blocks."""
        table = self.schedule
        peaks = ", ".join(str(table.peak(rank)) for rank in range(table.ranks))
        blocks = ", ".join(str(len(each)) for each in self.staged.blocks_of)
        return (
            f"pipeline {table.name}: a rank waits {float(table.bubble):.1%} of a step, where a backward takes as long "
            f"as two forwards;\nmicro-batches alive at most, by rank: {peaks}; blocks by stage: {blocks}."
        )

    def fullest(self, name: str) -> str:
        """Return the rank that holds most under a plan, and the least relative to it."""
        held = [held_bytes(report) for report in self.ranks[name]]
        return f"{held.index(max(held))}, least {min(held) / max(held):.0%}"

    def as_dict(self) -> dict[str, Any]:
        """Return the schedule, and each rank's bytes by preset, ready for JSON."""
        table = self.schedule
        return {
            "schedule": table.name,
            "chunks": table.chunks,
            "bubble": float(table.bubble),
            "peak": [table.peak(rank) for rank in range(table.ranks)],
            "stages": [list(blocks) for blocks in self.staged.blocks_of],
            "bytes_held_by_rank": {name: [report.bytes_held for report in each] for name, each in self.ranks.items()},
            "unsharded_between": {name: each[0].plan.held_between.axes == () for name, each in self.ranks.items()},
        }


def build_pipeline_model(model: ModelShape, options: argparse.Namespace) -> PipelineModel | None:
    """Return the model over the ranks of a pipeline; None without a pipeline.

    Raises:
        ConfigError: its blocks are unknown or fewer than stages, or the schedule does not support these numbers.
    """
    _check_pipe_options(options)
    if options.pipe == 1:
        return None
    table = schedule(options.schedule or "1f1b", options.pipe, options.micro_batches, options.chunks or 1)
    staged = StagedModel.of(model, options.pipe, table.chunks, options.tensor)
    return PipelineModel(staged, table, staged.edge_bytes(options.tokens or 0, options.precision), options.memory)


def _check_pipe_options(options: argparse.Namespace) -> None:
    for name in ("schedule", "chunks"):
        if getattr(options, name) and options.pipe == 1:
            do = "Leave one of them out, or say both."
            raise ConfigError(f"--{name}", expected="--pipe 2 or more beside it", got="another", do=do)
    if options.pipe > 1 and options.tiles:
        do = "Leave --tiles or --pipe out."
        raise ConfigError("--tiles", expected="layers in one piece where a pipeline cuts the model", got="tiles", do=do)
