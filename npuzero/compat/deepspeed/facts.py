"""Getters of an engine under DeepSpeed's names: batch sizes, ranks, dtypes, learning rates."""

from __future__ import annotations

from typing import Any

import torch

from npuzero.comm import World
from npuzero.compat.deepspeed.batch import BatchSizes
from npuzero.compat.deepspeed.recipe import EngineRecipe
from npuzero.compat.translation import Translation


class EngineFacts:
    """Provide an engine's configuration values under DeepSpeed's names.

    Attributes:
        translation: the decision for each key of the configuration.
        recipe: the result of the configuration.
    """

    translation: Translation
    recipe: EngineRecipe
    world: World
    batch: BatchSizes
    optimizer: Any

    @property
    def device(self) -> torch.device:
        """Return the device of this rank."""
        return self.world.device

    @property
    def global_rank(self) -> int:
        """Return the rank of this process."""
        return self.world.rank

    @property
    def world_size(self) -> int:
        """Return the number of ranks."""
        return self.world.size

    @property
    def dp_world_size(self) -> int:
        """Return the number of data ranks."""
        return self.batch.world

    def train_batch_size(self) -> int:
        """Return the samples of a step on all ranks together."""
        return self.batch.total

    def train_micro_batch_size_per_gpu(self) -> int:
        """Return the samples of a micro-batch on one rank."""
        return self.batch.micro

    def gradient_accumulation_steps(self) -> int:
        """Return the number of micro-batches between two updates."""
        return self.batch.accumulation

    def set_train_batch_size(self, train_batch_size: int) -> None:
        """Change the samples of a step by the number of passes; the micro-batch stays the same.

        Raises:
            ConfigError: it is no multiple of the samples in one pass of all ranks.
        """
        self.batch = self.batch.of_total(train_batch_size)

    def set_train_micro_batch_size(self, micro_batch_size: int) -> None:
        """Change the samples of a micro-batch on one rank, and with it the samples of a step.

        Raises:
            ConfigError: the number is not positive.
        """
        self.batch = self.batch.of_micro(micro_batch_size)

    def zero_optimization_stage(self) -> int:
        """Return the stage in the configuration."""
        return self.recipe.stage

    def gradient_clipping(self) -> float:
        """Return the largest norm of gradients; 0 means no limit."""
        return self.recipe.conduct.clip

    def fp16_enabled(self) -> bool:
        """Return whether parameters are float16."""
        return self.recipe.plan.precision.parameters is torch.float16

    def bfloat16_enabled(self) -> bool:
        """Return whether parameters are bfloat16."""
        return self.recipe.plan.precision.parameters is torch.bfloat16

    def get_lr(self) -> list[float]:
        """Return the learning rate of each parameter group; [] without an optimizer."""
        return self._of_groups("lr")

    def get_mom(self) -> list[Any]:
        """Return the momentum of each parameter group, or its betas if no group has a momentum."""
        has = any("momentum" in group for group in self._groups)
        return self._of_groups("momentum" if has else "betas")

    @property
    def _groups(self) -> list[dict[str, Any]]:
        return [] if self.optimizer is None else list(self.optimizer.param_groups)

    def _of_groups(self, name: str) -> list[Any]:
        return [group.get(name, 0.0) for group in self._groups]
