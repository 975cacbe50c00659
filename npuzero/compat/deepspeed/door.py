"""``npuzero.initialize``: DeepSpeed's call and configuration, run by npuzero."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils.data import DataLoader

from npuzero import adopt, comm
from npuzero.api import zero
from npuzero.comm import World
from npuzero.compat.deepspeed.arguments import read_trainer_arguments
from npuzero.compat.deepspeed.configuration import Config, explain
from npuzero.compat.deepspeed.engine import DeepSpeedEngine
from npuzero.compat.deepspeed.loader import build_data_loader
from npuzero.compat.deepspeed.recipe import EngineRecipe
from npuzero.config import describe_value
from npuzero.errors import ConfigError, refuse_unknown_keywords

_OptimizerLike = torch.optim.Optimizer | Callable[[Any], torch.optim.Optimizer]


class InitializedEngine(NamedTuple):
    """Hold the results of :func:`initialize`, in DeepSpeed's order."""

    engine: DeepSpeedEngine
    optimizer: torch.optim.Optimizer | None
    training_dataloader: DataLoader[Any] | None
    lr_scheduler: Any


@refuse_unknown_keywords(training_dataloader="training_data", scheduler="lr_scheduler", params="model_parameters")
def initialize(  # noqa: PLR0913 - DeepSpeed's arguments, by name, and two of npuzero's
    args: Any = None,
    model: nn.Module | None = None,
    optimizer: _OptimizerLike | None = None,
    model_parameters: Iterable[Any] | None = None,
    training_data: Any = None,
    lr_scheduler: Any = None,
    *,
    collate_fn: Callable[[Any], Any] | None = None,
    config: Config | None = None,
    config_params: Config | None = None,
    auto: Mapping[str, Any] | None = None,
    world: World | None = None,
) -> InitializedEngine:
    """Make an engine of a model by a DeepSpeed configuration, as ``deepspeed.initialize`` does.

    The model is sharded in place, on this rank's device. ``engine.translation`` has the decision for each key;
    ``npuzero config explain FILE`` prints it.

    Without an optimizer, neither here nor in the configuration, the engine is for inference, for example of a reference
    model: parameters are frozen, no optimizer states are stored, and no schedule is made.

    Args:
        args: has the path as ``deepspeed_config`` where ``config`` is not given. Arguments of transformers' Trainer
            (``learning_rate``, ``per_device_train_batch_size`` ...) fill in keys that are "auto".
        model: the same structure on every rank; rank 0's weights count.
        optimizer: an optimizer over the model's parameters, which is changed in place to update shards; one of
            npuzero's; or a function from parameters to one. It takes precedence over the configuration's.
        model_parameters: parameters, or groups of them with options; None means all that train.
        training_data: a dataset; each rank reads its part.
        lr_scheduler: one over ``optimizer``, or a function of an optimizer. It takes precedence over the
            configuration's.
        collate_fn: makes a batch of samples.
        config: a dict, or the path of a JSON file; ``config_params`` is its old name.
        auto: values for keys that are "auto", by path, such as ``{"optimizer.params.lr": 1e-4}``; they take precedence
            over those of ``args``.
        world: the ranks; None means those of :func:`npuzero.init`.

    Returns:
        The engine, its optimizer (None for inference), the loader (None without data) and the schedule (None if neither
        the call nor the configuration has one).

    Raises:
        ConfigError: keys that npuzero cannot follow, each with an alternative; no configuration; ``model_parameters``
            or ``lr_scheduler`` without an optimizer; a schedule over another optimizer.

    Example::

        config = {
            "train_micro_batch_size_per_gpu": 2,
            "gradient_accumulation_steps": 2,
            "gradient_clipping": 1.0,
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
            "zero_optimization": {"stage": 2},
        }
        engine, optimizer, _, _ = npuzero.initialize(model=net, config=config)
        for batch in torch.randn(4, 2, 8, device=engine.device):
            loss = engine(batch).square().mean()
            engine.backward(loss)
            engine.step()
    """
    if not isinstance(model, nn.Module):
        raise ConfigError(
            "npuzero.initialize: model", expected="a torch.nn.Module", got=describe_value(model), do="Pass model=net."
        )
    ranks = world or comm.current_world()
    found = explain(
        _choose_configuration(config, config_params, args),
        world=ranks.size,
        auto={**read_trainer_arguments(args, ranks.size), **(auto or {})},
    )
    recipe = EngineRecipe.of(found, ranks.size)
    trains = optimizer is not None or recipe.optimizer is not None
    if not trains:
        _check_for_inference(model_parameters=model_parameters, lr_scheduler=lr_scheduler)
        model.requires_grad_(False)
    _move_model(model, ranks, recipe)
    zero(model, plan=recipe.plan, settings=recipe.settings, world=ranks)
    made, schedule = None, None
    if trains:
        made = _build_optimizer(optimizer, recipe, model, model_parameters)
        _check_shared(made, model)
        schedule = _build_schedule(lr_scheduler, recipe, made)
    loader = build_data_loader(training_data, collate_fn, recipe, ranks)
    return InitializedEngine(
        DeepSpeedEngine(model, made, schedule, loader, recipe, ranks, found), made, loader, schedule
    )


def _choose_configuration(config: Config | None, config_params: Config | None, args: Any) -> Config:
    said = [value for value in (config, config_params, getattr(args, "deepspeed_config", None)) if value is not None]
    if len(said) != 1:
        raise ConfigError(
            "npuzero.initialize: config",
            expected="one configuration: config=, or args.deepspeed_config",
            got="none" if not said else f"{len(said)} of them",
            do="Pass config=, a dict or the path of a JSON file.",
        )
    return said[0]


def _check_for_inference(**given: Any) -> None:
    """Check that no argument is given that needs an optimizer.

    Raises:
        ConfigError: one is.
    """
    names = [f"{name}=" for name, value in given.items() if value is not None]
    if names:
        raise ConfigError(
            "npuzero.initialize",
            expected=f"an optimizer beside {' and '.join(names)}",
            got="neither optimizer= nor the key 'optimizer'",
            do='Pass one, or say {"optimizer": {"type": "AdamW", "params": {"lr": 1e-4}}}. For inference leave out '
            f"{' and '.join(names)}.",
        )


def _move_model(model: nn.Module, world: World, recipe: EngineRecipe) -> None:
    """Move the model to this rank's device, unless a parameter is on meta, and convert parameters and buffers.

    Converting first makes master weights start from the 16-bit values, as in DeepSpeed. Under :func:`npuzero.zero`
    alone they start from the unconverted values.
    """
    if not any(parameter.is_meta for parameter in model.parameters()):
        model.to(world.device)
    for parameter in model.parameters():
        if parameter.is_floating_point():
            parameter.data = parameter.data.to(recipe.plan.precision.parameter_of(parameter.dtype))
    dtype = recipe.conduct.buffers
    for buffer in model.buffers() if dtype is not None else ():
        if buffer.is_floating_point():
            buffer.data = buffer.data.to(dtype)


def _build_optimizer(
    given: _OptimizerLike | None, recipe: EngineRecipe, model: nn.Module, parameters: Iterable[Any] | None
) -> torch.optim.Optimizer:
    over = [p for p in model.parameters() if p.requires_grad] if parameters is None else list(parameters)
    if given is None:
        assert recipe.optimizer is not None
        maker, options = recipe.optimizer
        made: torch.optim.Optimizer = maker(over, options)
        return made
    return adopt.adopt_optimizer(given if isinstance(given, torch.optim.Optimizer) else given(over))


def _check_shared(optimizer: torch.optim.Optimizer, model: nn.Module) -> None:
    """Check that the optimizer has at least one of the model's parameters.

    Raises:
        ConfigError: it has none.
    """
    known = set(map(id, model.parameters()))
    given = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    if known.isdisjoint(map(id, given)):
        raise ConfigError(
            "npuzero.initialize: the parameters of the optimizer",
            expected="parameters of model=, or some of them",
            got=f"{len(given)} others, none of which it has",
            do="Build the optimizer over the parameters of the model that is passed, or pass model_parameters= of it.",
        )


def _build_schedule(given: Any, recipe: EngineRecipe, optimizer: torch.optim.Optimizer) -> Any:
    if given is None:
        return None if recipe.schedule is None else recipe.schedule[0](optimizer, recipe.schedule[1])
    if callable(given) and not hasattr(given, "step"):
        return given(optimizer)
    for part in (*getattr(given, "_schedulers", ()), given):
        its = getattr(part, "optimizer", optimizer)
        if its is not optimizer:
            raise ConfigError(
                "lr_scheduler",
                expected="a schedule over the optimizer that is passed beside it, or a function of an optimizer",
                got=f"{type(part).__name__} over {describe_value(its)}",
                do="Pass lr_scheduler=lambda optimizer: Schedule(optimizer, ...).",
            )
    return given
