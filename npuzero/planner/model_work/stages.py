"""A model over the ranks of a pipeline: exact bytes held and sent by each rank."""

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

#: Parts of a decoder built by npuzero, in call order.
_CHAIN = ("embed_tokens", "layers", "norm", "lm_head")


@dataclass(frozen=True)
class StagedModel:
    """Predict memory and traffic of a model over the ranks of a pipeline.

    Attributes:
        ranks: the stages of each pipeline rank, on meta.
        width: features of each token between blocks.
        tensor: tensor ranks.
        sliced: whether each tensor rank has a slice of the tokens between stages; else each has all of them.
    """

    ranks: Sequence[Pipeline]
    width: int
    tensor: int
    sliced: bool

    @staticmethod
    @lru_cache(maxsize=16)
    def of(model: ModelShape, ranks: int, chunks: int = 1, tensor: int = 1) -> StagedModel:
        """Return ``model`` as :func:`npuzero.pipeline` divides it without ``split``.

        Args:
            model: a model divided over the ``tensor`` ranks.

        Raises:
            ConfigError: its blocks are unknown, or there are fewer than stages.
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
        """Return the candidates for most memory: the first, the last, and the middle rank with most elements."""
        last = len(self.ranks) - 1
        return tuple(sorted({0, max(range(1, last), key=self._numels.__getitem__, default=last), last}))

    @cached_property
    def first_share(self) -> float:
        """Return the first rank's fraction of all elements."""
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
        """Return by pipeline rank the bytes held and sent in a step; ``ranks``: only these."""
        found = {}
        for number in range(len(self.ranks)) if ranks is None else ranks:
            rank = self.ranks[number]
            rank.follow(schedule, 1 if self.sliced else self.tensor)  # if each has all tokens, each sends a part
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
        """Return the plan with parameters unsharded between micro-batches if :func:`npuzero.pipeline` keeps them so.

        That is if the states then take at most half of a rank's memory; ``memory_bytes`` None: no limit.
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
    """Return the blocks of a decoder built by npuzero; None: the model names its blocks itself."""
    if not getattr(module, "counted", False):
        return None
    if "rest" in module._parameters:  # the remainder of a size, outside blocks
        module.get_submodule("norm").register_parameter("rest", module._parameters.pop("rest"))
    return [name for name in _CHAIN if name in module._modules]


def _embedding_width(module: nn.Module) -> int:
    """Return the features of each token between blocks: the width of the embedding."""
    embedding = next(each for each in module.modules() if isinstance(each, nn.Embedding))
    return embedding.embedding_dim
