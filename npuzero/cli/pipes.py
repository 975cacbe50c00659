"""What ``npuzero plan`` knows of pipelines: the model cut into stages, what each rank holds, and the schedule."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from npuzero.api.model import predict
from npuzero.cli.arguments import number
from npuzero.config import Settings
from npuzero.errors import ConfigError
from npuzero.parallel.kept import BETWEEN_SHARE, unsharded_between
from npuzero.parallel.pipeline import Pipeline
from npuzero.parallel.schedule import NAMES, Schedule, schedule
from npuzero.parallel.stages import divide
from npuzero.parallel.tensor import MODES
from npuzero.plan import PRECISIONS, Memory, MeshShape, Plan, Report
from npuzero.planner.models import ModelShape

#: Parts of a decoder that is counted here, in the order in which they are called.
_CHAIN = ("embed_tokens", "layers", "norm", "lm_head")


def add_options(axes: Any) -> None:
    """Add what says how a model is cut into stages, and in which order they run."""
    axes.add_argument("--pipe", type=number, default=1, metavar="N", help="ranks of a pipeline (1; docs/pipeline.md)")
    axes.add_argument("--schedule", choices=NAMES, help="of the pipeline (1f1b)")
    axes.add_argument("--chunks", type=number, metavar="N", help="stages of each rank, with --schedule interleaved (1)")


@dataclass(frozen=True)
class Piped:
    """Predict for a model over the ranks of a pipeline; what it says is that of the rank that holds most.

    Attributes:
        stages: what each rank of the pipeline has, on meta.
        schedule: in which order each runs it.
        edge_bytes: of a micro-batch's activations between stages, as each rank holds them.
        memory_bytes: of a rank; None: nobody said.
        ranks: by plan the report of each rank, as far as ``predict`` has been called.
    """

    stages: Sequence[Pipeline]
    schedule: Schedule
    edge_bytes: int
    memory_bytes: int | None
    ranks: dict[str, list[Report]] = field(default_factory=dict)

    def predict(self, plan: Plan, mesh: MeshShape, settings: Settings, clip: bool) -> Report:
        """Return the report of the rank that holds most on its device; parameters stay unsharded between micro-batches
        where :func:`npuzero.pipeline` would have them so.
        """
        kept = unsharded_between(plan)
        found = [] if kept is None else self._each(kept, mesh, settings, clip)
        limit = None if self.memory_bytes is None else BETWEEN_SHARE * self.memory_bytes
        if not found or (limit is not None and max(map(_held, found)) > limit):
            found = self._each(plan, mesh, settings, clip)
        self.ranks[plan.name] = found
        return max(found, key=_held)

    def _each(self, plan: Plan, mesh: MeshShape, settings: Settings, clip: bool) -> list[Report]:
        sent = self.edge_bytes
        return [
            predict(stages, plan, mesh, clip=clip, settings=settings, activation_bytes=sent) for stages in self.stages
        ]

    def told(self) -> str:
        """Return what the schedule comes to."""
        table = self.schedule
        peaks = ", ".join(str(table.peak(rank)) for rank in range(table.ranks))
        blocks = ", ".join(str(len(each)) for each in self.stages[0].blocks_of)
        return (
            f"pipeline {table.name}: a rank waits {float(table.bubble):.1%} of a step, where a backward takes as long "
            f"as two forwards;\nmicro-batches alive at most, by rank: {peaks}; blocks by stage: {blocks}."
        )

    def fullest(self, name: str) -> str:
        """Return which rank of the pipeline holds most under a plan, and how much less the one that holds least."""
        held = [_held(report) for report in self.ranks[name]]
        return f"{held.index(max(held))}, least {min(held) / max(held):.0%}"

    def as_dict(self) -> dict[str, Any]:
        """Return the schedule, and by preset what each rank holds, as JSON has it."""
        table = self.schedule
        return {
            "schedule": table.name,
            "chunks": table.chunks,
            "bubble": float(table.bubble),
            "peak": [table.peak(rank) for rank in range(table.ranks)],
            "stages": [list(blocks) for blocks in self.stages[0].blocks_of],
            "bytes_held_by_rank": {name: [report.bytes_held for report in each] for name, each in self.ranks.items()},
            "unsharded_between": {name: each[0].plan.held_between.axes == () for name, each in self.ranks.items()},
        }


def piped(model: ModelShape, options: argparse.Namespace) -> Piped | None:
    """Return the model over the ranks of a pipeline; None where there is none.

    Raises:
        ConfigError: its blocks are not known, are fewer than stages, or the schedule is not one for these numbers.
    """
    _check(options)
    if options.pipe == 1:
        return None
    if model.module is None:
        raise _unknown(model.name, options.pipe)
    module = model.module()
    table = schedule(options.schedule or "1f1b", options.pipe, options.micro_batches, options.chunks or 1)
    division = divide(module, options.pipe, table.chunks, blocks=_blocks(module))
    stages = [division.take(range(rank, table.stages, options.pipe), Pipeline) for rank in range(options.pipe)]
    sliced = MODES[options.mode or "mtp"].sliced
    for each in stages:
        each.follow(table, 1 if sliced else options.tensor)
    itemsize = PRECISIONS[options.precision].parameter_of(torch.float32).itemsize
    edge_bytes = (options.tokens or 0) * _width(module) * itemsize // (options.tensor if sliced else 1)
    return Piped(stages, table, edge_bytes, options.memory)


def _blocks(module: nn.Module) -> list[str] | None:
    """Return the blocks of a decoder that is counted here; None: the model says it itself."""
    if not getattr(module, "counted", False):
        return None
    if "rest" in module._parameters:  # what a size leaves, which no block has
        module.get_submodule("norm").register_parameter("rest", module._parameters.pop("rest"))
    return [name for name in _CHAIN if name in module._modules]


def _width(module: nn.Module) -> int:
    """Return the features of each token between blocks: those of the embedding."""
    embedding = next(each for each in module.modules() if isinstance(each, nn.Embedding))
    return embedding.embedding_dim


def _check(options: argparse.Namespace) -> None:
    for name in ("schedule", "chunks"):
        if getattr(options, name) and options.pipe == 1:
            do = "Leave one of them out, or say both."
            raise ConfigError(f"--{name}", expected="--pipe 2 or more beside it", got="another", do=do)
    if options.pipe > 1 and options.tiles:
        do = "Leave --tiles or --pipe out."
        raise ConfigError("--tiles", expected="layers in one piece where a pipeline cuts the model", got="tiles", do=do)


def _unknown(name: str, ranks: int) -> ConfigError:
    return ConfigError(
        f"{name}: --pipe {ranks}",
        expected="a kind of model whose blocks are known: base_model_pp_plan of transformers",
        got="none that is known without transformers",
        do="Run: pip install transformers.",
    )


def _held(report: Report) -> int:
    return report.memory[Memory.DEVICE.value]
