"""Make mesh, model, optimizer and schedules from an InternEvo configuration by one call."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from torch import nn
from torch.utils.checkpoint import checkpoint

from npuzero import parallel
from npuzero.api import pipeline, zero
from npuzero.checkpoint.weight_files.read_weights import Weights
from npuzero.comm import Mesh, World
from npuzero.compat.internevo.configuration import Configuration, load
from npuzero.compat.internevo.optimizer import HybridZeroOptimizer
from npuzero.compat.internevo.settle import Source
from npuzero.errors import ConfigError, refuse_unknown_keywords
from npuzero.parallel.pipeline_parallel.runner import Loss, Pipeline
from npuzero.plan import PIPE, SEQUENCE, TENSOR
from npuzero.schedules import Beta2Scheduler, FineTuneCosineAnnealingWarmupLR
from npuzero.shard.layout.find_units import discover_units

#: Divides a model over the ranks of a mesh, and returns it.
Divide = Callable[[nn.Module, Mesh], nn.Module]


class InitializedTraining(NamedTuple):
    """Hold the results of :func:`initialize`.

    Attributes:
        model: the sharded model; with a pipeline the result of :func:`npuzero.pipeline`, whose ``step`` scales the
            loss.
        optimizer: the optimizer, with loss scale and clipping inside.
        beta2_scheduler, lr_scheduler: step them after each optimizer step that was not skipped; None where the
            configuration has no such section.
        mesh: the ranks.
    """

    model: nn.Module
    optimizer: HybridZeroOptimizer
    beta2_scheduler: Beta2Scheduler | None
    lr_scheduler: FineTuneCosineAnnealingWarmupLR | None
    mesh: Mesh


@refuse_unknown_keywords(config="configuration")
def initialize(
    model: nn.Module,
    configuration: Configuration | Source,
    *,
    world: World | None = None,
    divide: Divide | None = None,
    loss_fn: Loss | None = None,
    blocks: Sequence[nn.Module | str] | None = None,
    weights: str | Path | Weights | None = None,
) -> InitializedTraining:
    """Shard ``model``, and make optimizer and schedules by an InternEvo configuration. Call it on every rank.

    Args:
        model: your model, on this rank's device or on meta. The layers in the section ``model`` are not read.
        configuration: the result of :func:`load`, or its argument.
        world: the ranks; None means those of :func:`npuzero.init`.
        divide: divides the model over tensor or sequence ranks; None means ``npuzero.parallel.tensor`` in the
            configuration's mode, or ``npuzero.parallel.sequence``.
        loss_fn, blocks: of a pipeline, as for :func:`npuzero.pipeline`.
        weights: safetensors, as for :func:`npuzero.zero`.

    Raises:
        ConfigError: a key is refused, a size does not divide the ranks, or :func:`npuzero.zero` or another of these
            calls refuses an argument.

    Example::

        import torch
        from npuzero.compat import internevo

        net = torch.nn.Sequential(*(torch.nn.Linear(8, 8) for _ in range(4)))
        model, optimizer, beta2_scheduler, lr_scheduler, mesh = internevo.initialize(net, "7B_sft.py")
        optimizer.backward(model(torch.ones(2, 8, dtype=torch.bfloat16)).square().mean())
        done, norms = optimizer.step()
        if done:
            lr_scheduler.step()
            beta2_scheduler.step()
    """
    config = configuration if isinstance(configuration, Configuration) else load(configuration)
    mesh = config.mesh(world)
    model = _divide_model(model, mesh, config, divide)
    _recompute_blocks(model, config.checkpointed)
    plan = config.plan(mesh.world.size)
    if mesh.size((PIPE,)) > 1:
        model = pipeline(
            model,
            mesh,
            plan=plan,
            loss_fn=loss_fn,
            blocks=blocks,
            weights=weights,
            settings=config.settings,
            **config.division,
        )
    else:
        model = zero(model, plan=plan, weights=weights, mesh=mesh, settings=config.settings)
    adamw = config.adamw(parameter for parameter in model.parameters() if parameter.requires_grad)
    optimizer = HybridZeroOptimizer(model, adamw, config.scaler(), config.max_norm)
    if isinstance(model, Pipeline):
        # The program does not scale a pipeline's loss, and the optimizer's step() divides by the scale.
        model.step = functools.partial(model.step, scaler=optimizer.grad_scaler)  # type: ignore[method-assign]
    return InitializedTraining(model, optimizer, config.beta2_scheduler(adamw), config.lr_scheduler(adamw), mesh)


def _divide_model(model: nn.Module, mesh: Mesh, config: Configuration, divide: Divide | None) -> nn.Module:
    """Return the model, divided over its tensor or sequence ranks if there are any."""
    tensor, sequence = mesh.size((TENSOR,)), mesh.size((SEQUENCE,))
    if tensor == sequence == 1:
        return model
    if divide is not None:
        return divide(model, mesh)
    return parallel.tensor(model, mesh, mode=config.mode) if tensor > 1 else parallel.sequence(model, mesh)


def _recompute_blocks(model: nn.Module, fraction: float) -> None:
    """Run the first ``fraction`` of the blocks again in backward (activation checkpointing)."""
    blocks = [unit.module for unit in discover_units(model)[1:]]
    if fraction and not blocks:
        raise ConfigError(
            "model.checkpoint",
            expected="a model with a list of blocks",
            got=f"{type(model).__name__}, in which no list repeats a class",
            do="Call torch.utils.checkpoint in the model, and set checkpoint=False.",
        )
    for block in blocks[: int(len(blocks) * fraction)]:
        again = functools.partial(checkpoint, block.forward, use_reentrant=False)
        block.forward = again
