"""What a configuration comes to, in npuzero's words: all that an engine is made of."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from npuzero.compat.deepspeed.batch import Batch, complete
from npuzero.compat.deepspeed.configuration import made_optimizer, made_schedule
from npuzero.compat.deepspeed.makers import Maker
from npuzero.compat.deepspeed.plans import parameter_dtype, plan_of, settings_of
from npuzero.compat.translation import Translation
from npuzero.config import Settings
from npuzero.plan import Plan


@dataclass(frozen=True)
class Conduct:
    """Say how an engine behaves at an update.

    Args:
        clip: the largest global norm of gradients; 0: any.
        managed: whether the engine counts passes, and updates at each ``accumulation``-th alone.
        ignores_unused: whether a parameter may have no gradient.
        measures_norm: whether there is a global norm to be asked for.
        gathers_on_save: whether ``save_16bit_model`` gathers what is sharded.
        buffers: the dtype that floating buffers are converted to; None: their own.
    """

    clip: float = 1.0
    managed: bool = True
    ignores_unused: bool = True
    measures_norm: bool = True
    gathers_on_save: bool = False
    buffers: torch.dtype | None = None


@dataclass(frozen=True)
class Recipe:
    """Hold what a configuration comes to.

    Args:
        batch: of a step.
        plan, settings: for :func:`npuzero.zero`.
        scale: options of the loss scaler; None: nothing is skipped.
        autocast: the dtype of ``torch.autocast`` around each forward; None: there is none.
        optimizer, schedule: what makes them, and the options; None: the file names none.
        drop_last: whether the loader drops what does not fill a batch.
        conduct: how the engine behaves.
        stage: the number that the file says.
    """

    batch: Batch
    plan: Plan
    settings: Settings
    scale: dict[str, Any] | None
    autocast: torch.dtype | None
    optimizer: tuple[Maker, dict[str, Any]] | None
    schedule: tuple[Maker, dict[str, Any]] | None
    drop_last: bool
    conduct: Conduct
    stage: int

    @classmethod
    def of(cls, found: Translation, world: int) -> Recipe:
        """Return the recipe of a configuration that npuzero can follow on ``world`` data ranks.

        Raises:
            ConfigError: keys that it cannot follow, each with its way out.
        """
        found.check()
        batch, cast = found.into("Batch"), found.into("Autocast")
        return cls(
            complete(batch.get("total"), batch.get("micro"), batch.get("accumulation"), world),
            plan_of(found),
            settings_of(found),
            _scale_of(found),
            cast.get("dtype", torch.bfloat16) if cast.get("enabled") else None,
            _with_options(made_optimizer(found), found.into("optimizer")),
            _with_options(made_schedule(found), found.into("lr_scheduler")),
            bool(found.into("Loader").get("drop_last", False)),
            Conduct(**found.into("Engine")),
            int(found.into("zero").get("stage", 0)),
        )


def _with_options(maker: Maker | str | None, options: dict[str, Any]) -> tuple[Maker, dict[str, Any]] | None:
    return (maker, options) if isinstance(maker, Maker) else None


def _scale_of(found: Translation) -> dict[str, Any] | None:
    """Return the options of the loss scaler: one that moves, one that stays, or that of 1, which skips alone."""
    parameters = parameter_dtype(found)
    if parameters is torch.float16:
        said = found.into("LossScaler")
        static, power = said.pop("static"), said.pop("power")
        return (
            {**said, "init_scale": max(2.0**power, said["floor"]), "growth_delay": 1} if not static else _still(static)
        )
    return _still(1.0) if parameters is torch.bfloat16 and found.into("bf16").get("check", True) else None


def _still(scale: float) -> dict[str, Any]:
    return {"init_scale": float(scale), "floor": float(scale), "ceiling": float(scale)}
