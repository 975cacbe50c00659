"""Collect everything that an engine is built from: the result of a configuration in npuzero's terms."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from npuzero.compat.deepspeed.batch import BatchSizes, complete_batch_sizes
from npuzero.compat.deepspeed.configuration import find_optimizer_maker, find_schedule_maker
from npuzero.compat.deepspeed.makers import ObjectMaker
from npuzero.compat.deepspeed.plans import build_translated_plan, build_translated_settings, get_parameter_dtype
from npuzero.compat.translation import Translation
from npuzero.config import Settings
from npuzero.plan import Plan


@dataclass(frozen=True)
class UpdateBehavior:
    """Describe the behaviour of an engine at an update.

    Args:
        clip: the largest global norm of gradients; 0 means no limit.
        managed: whether the engine counts passes, and updates only at each ``accumulation``-th one.
        skips: whether an update is skipped for gradients that are inf or NaN, without a loss scale.
        measures_norm: whether the global norm is available.
        gathers_on_save: whether ``save_16bit_model`` gathers sharded parameters.
        buffers: the dtype that floating buffers are converted to; None keeps theirs.
    """

    clip: float = 1.0
    managed: bool = True
    skips: bool = False
    measures_norm: bool = True
    gathers_on_save: bool = False
    buffers: torch.dtype | None = None


@dataclass(frozen=True)
class EngineRecipe:
    """Hold the result of a configuration.

    Args:
        batch: of a step.
        plan, settings: for :func:`npuzero.zero`.
        scale: options of the loss scaler; None without one.
        autocast: the dtype of ``torch.autocast`` around each forward; None without it.
        optimizer, schedule: the maker and its options; None where the file names none.
        drop_last: whether the loader drops an incomplete batch.
        conduct: the engine's behaviour at an update.
        stage: the stage number in the file.
    """

    batch: BatchSizes
    plan: Plan
    settings: Settings
    scale: dict[str, Any] | None
    autocast: torch.dtype | None
    optimizer: tuple[ObjectMaker, dict[str, Any]] | None
    schedule: tuple[ObjectMaker, dict[str, Any]] | None
    drop_last: bool
    conduct: UpdateBehavior
    stage: int

    @classmethod
    def of(cls, found: Translation, world: int) -> EngineRecipe:
        """Return the recipe of a configuration that npuzero can follow on ``world`` data ranks.

        Raises:
            ConfigError: a key that npuzero cannot follow; each with an alternative.
        """
        found.check()
        batch, cast, bf16 = found.into("Batch"), found.into("Autocast"), found.into("bf16")
        return cls(
            complete_batch_sizes(batch.get("total"), batch.get("micro"), batch.get("accumulation"), world),
            build_translated_plan(found),
            build_translated_settings(found),
            _loss_scaler_options(found),
            cast.get("dtype", torch.bfloat16) if cast.get("enabled") else None,
            _pair_with_options(find_optimizer_maker(found), found.into("optimizer")),
            _pair_with_options(find_schedule_maker(found), found.into("lr_scheduler")),
            bool(found.into("Loader").get("drop_last", False)),
            UpdateBehavior(skips=bool(bf16.get("enabled") and bf16.get("check", True)), **found.into("Engine")),
            int(found.into("zero").get("stage", 0)),
        )


def _pair_with_options(
    maker: ObjectMaker | str | None, options: dict[str, Any]
) -> tuple[ObjectMaker, dict[str, Any]] | None:
    return (maker, options) if isinstance(maker, ObjectMaker) else None


def _loss_scaler_options(found: Translation) -> dict[str, Any] | None:
    """Return the options of the loss scaler, dynamic or static; a static one still skips steps that overflow."""
    if get_parameter_dtype(found) is not torch.float16:
        return None
    said = found.into("LossScaler")
    static, power = float(said.pop("static")), said.pop("power")
    if static:
        return {"init_scale": static, "floor": static, "ceiling": static}
    return {**said, "init_scale": max(2.0**power, said["floor"]), "growth_delay": 1}
