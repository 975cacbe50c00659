"""A model over the ranks of a pipeline: what each of them holds and sends, exactly."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache

import torch
from torch import nn

from npuzero.api.model import predict
from npuzero.config import Settings
from npuzero.errors import ConfigError
from npuzero.parallel.pipeline_parallel.divide import divide_into_stages
from npuzero.parallel.pipeline_parallel.keep_between import BETWEEN_SHARE, make_unsharded_plan
from npuzero.parallel.pipeline_parallel.runner import Pipeline
from npuzero.parallel.pipeline_parallel.schedule import PipelineSchedule
from npuzero.parallel.tensor_parallel.api import MODES
from npuzero.plan import Memory, MeshShape, Plan, PrecisionLike, Report, parse_precision
from npuzero.planner.models import ModelShape

#: Parts of a decoder that is counted here, in the order in which they are called.
_CHAIN = ("embed_tokens", "layers", "norm", "lm_head")


@dataclass(frozen=True)
class StagedModel:
    """Predict for a model over the ranks of a pipeline.

    Attributes:
        ranks: what each rank of the pipeline has, on meta.
        width: features of each token between blocks.
        tensor: tensor ranks.
        sliced: whether each of these has a slice of the tokens between stages; else all have all of them.
    """

    ranks: Sequence[Pipeline]
    width: int
    tensor: int
    sliced: bool

    @staticmethod
    @lru_cache(maxsize=16)
    def of(model: ModelShape, ranks: int, chunks: int = 1, tensor: int = 1) -> StagedModel:
        """Return ``model`` as :func:`npuzero.pipeline` cuts it without ``split``.

        Args:
            model: divided over the ``tensor`` ranks.

        Raises:
            ConfigError: its blocks are not known, or are fewer than stages.
        """
        if model.module is None:
            raise ConfigError(
                f"{model.name}: --pipe {ranks}",
                expected="a kind of model whose blocks are known: base_model_pp_plan of transformers",
                got="none that is known without transformers",
                do="Run: pip install transformers.",
            )
        module = model.module()
        division = divide_into_stages(module, ranks, chunks, blocks=_list_decoder_blocks(module))
        stages = [division.take(range(rank, ranks * chunks, ranks), Pipeline) for rank in range(ranks)]
        return StagedModel(stages, _embedding_width(module), tensor, tensor > 1 and MODES[model.mode].sliced)

    @property
    def blocks_of(self) -> Sequence[Sequence[str]]:
        """Return the names of each stage's blocks."""
        return self.ranks[0].blocks_of

    def edge_bytes(self, tokens: int, precision: PrecisionLike) -> int:
        """Return the bytes of a micro-batch of ``tokens`` between two stages, as each rank holds them."""
        itemsize = parse_precision(precision).parameter_of(torch.float32).itemsize
        return tokens * self.width * itemsize // (self.tensor if self.sliced else 1)

    @cached_property
    def telling(self) -> tuple[int, ...]:
        """Return the ranks of which one holds most: both ends, and between them the one that has most elements."""
        last = len(self.ranks) - 1
        return tuple(sorted({0, max(range(1, last), key=self._numels.__getitem__, default=last), last}))

    @cached_property
    def first_share(self) -> float:
        """Return the part of all ranks' elements that the first rank has."""
        return self._numels[0] / sum(self._numels)

    @cached_property
    def _numels(self) -> list[int]:
        return [sum(parameter.numel() for parameter in rank.parameters()) for rank in self.ranks]

    def reports(
        self,
        plan: Plan,
        mesh: MeshShape,
        settings: Settings,
        schedule: PipelineSchedule,
        clip: bool,
        edge_bytes: int,
        ranks: Iterable[int] | None = None,
    ) -> dict[int, Report]:
        """Return by rank of the pipeline what it holds and sends in a step; ``ranks``: of these alone."""
        found = {}
        for number in range(len(self.ranks)) if ranks is None else ranks:
            rank = self.ranks[number]
            rank.follow(schedule, 1 if self.sliced else self.tensor)  # where all have all, each sends a part
            found[number] = predict(rank, plan, mesh, clip=clip, settings=settings, activation_bytes=edge_bytes)
        return found

    def as_trained(
        self,
        plan: Plan,
        mesh: MeshShape,
        settings: Settings,
        schedule: PipelineSchedule,
        clip: bool,
        memory_bytes: float | None,
    ) -> Plan:
        """Return the plan with parameters unsharded between micro-batches where :func:`npuzero.pipeline` would have
        them so: if the states then take no more than half of a rank's memory; None: whatever they take.
        """
        kept = make_unsharded_plan(plan)
        if kept is None or memory_bytes is None:
            return kept or plan
        found = self.reports(kept, mesh, settings, schedule, clip, 0, self.telling)
        return kept if max(map(held_bytes, found.values())) <= BETWEEN_SHARE * memory_bytes else plan


def held_bytes(report: Report) -> int:
    """Return the bytes that a rank holds on its device."""
    return report.memory[Memory.DEVICE.value]


def _list_decoder_blocks(module: nn.Module) -> list[str] | None:
    """Return the blocks of a decoder that is counted here; None: the model says it itself."""
    if not getattr(module, "counted", False):
        return None
    if "rest" in module._parameters:  # what a size leaves, which no block has
        module.get_submodule("norm").register_parameter("rest", module._parameters.pop("rest"))
    return [name for name in _CHAIN if name in module._modules]


def _embedding_width(module: nn.Module) -> int:
    """Return the features of each token between blocks: those of the embedding."""
    embedding = next(each for each in module.modules() if isinstance(each, nn.Embedding))
    return embedding.embedding_dim
