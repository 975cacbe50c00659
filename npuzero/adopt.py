"""Adoption: what a framework hands over (a model, its optimizer, its schedulers) becomes npuzero's.

The doors of accelerate, transformers and Lightning are built of it. A framework makes these objects by the user's own
lines, of torch's classes, and holds on to them: so a model is sharded in place, and so is what its optimizer updates.
"""

from __future__ import annotations

import contextlib
import inspect
import itertools
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from npuzero import checkpoint
from npuzero.api import ZeroOptimizer, init, no_sync, zero
from npuzero.config import describe_value
from npuzero.errors import ConfigError, PackageMissing
from npuzero.optim.adam import FUSED
from npuzero.optim.fused import FusedWorker
from npuzero.optim.optimizer import shard_in_place
from npuzero.optim.workers.torch_optimizer import TorchOptimizerWorker
from npuzero.shard.find_engine import engine_of, split_by_engine
from npuzero.shard.parameters.across_stages import exchange_or_raise

Model = TypeVar("Model", bound=nn.Module)

#: The folder for checkpoints of sharded models, within what a framework saves.
FOLDER = "npuzero"


def package_missing_error(door: str, package: str, error: ImportError) -> PackageMissing:
    """Return the error that ``package``, behind ``door``, cannot be imported."""
    return PackageMissing(
        door,
        expected=f"the package {package}",
        got=str(error),
        do=f"pip install 'npuzero[frameworks]', or {package} alone.",
    )


def shard_framework_model(model: Model, device: torch.device, options: Mapping[str, Any]) -> Model:
    """Shard ``model`` as :func:`npuzero.zero` does, over the ranks that the framework has started; once.

    Args:
        model: anywhere; it is moved to ``device`` first, but for what is on meta. One that :func:`npuzero.zero` has
            seen, or that has no parameters, is left as it is.
        device: of this rank.
        options: keyword arguments of :func:`npuzero.zero`. Buffers are rank 0's, as DistributedDataParallel has it,
            unless these say otherwise.

    Raises:
        ConfigError: a part of it is sharded by itself, or ``options`` that :func:`npuzero.zero` refuses.
    """
    if is_sharded(model) or next(model.parameters(), None) is None:
        return model
    if split_by_engine(model.parameters())[0]:
        raise ConfigError(
            type(model).__name__,
            expected="a model that npuzero.zero() is yet to see, or has seen as a whole",
            got="one of which a part is sharded by itself",
            do="Leave npuzero.zero() to the framework's door: its options are the argument zero={...} there.",
        )
    init(device)
    if not any(tensor.is_meta for tensor in itertools.chain(model.parameters(), model.buffers())):
        model.to(device)
    return zero(model, **{"buffers": "broadcast", **options})


def is_sharded(model: object) -> bool:
    """Tell whether ``model`` is one that :func:`npuzero.zero` returned."""
    return getattr(model, "_npuzero", None) is not None


def gathers_parameters(model: nn.Module) -> bool:
    """Tell whether a forward of ``model`` gathers parameters from other ranks, so that every rank must run as many."""
    if not is_sharded(model):
        return False
    engine = engine_of(model)
    return engine.world.size > 1 and any(unit.guarded for unit in engine.units)


def has_sharded_parameters(parameters: Iterable[nn.Parameter]) -> bool:
    """Tell whether any of ``parameters`` is of a sharded model."""
    return bool(split_by_engine(parameters)[0])


def adopt_optimizer(optimizer: Optimizer) -> Optimizer:
    """Have ``optimizer`` update the shards of its parameters, in place.

    torch's AdamW and Adam update as npuzero's do; any other class that is element-wise updates each rank's shards.
    Groups, ``defaults``, hooks and attributes stay the program's, the very objects, and the state goes on.

    Returns:
        ``optimizer``; as it was, where it is npuzero's or none of its parameters is sharded.

    Raises:
        ConfigError: it is not element-wise, cannot be made again from its options, or has methods that the program
            has replaced.
    """
    if isinstance(optimizer, ZeroOptimizer) or not has_sharded_parameters(get_optimizer_parameters(optimizer)):
        return optimizer
    scheduled = hasattr(optimizer.step, "_wrapped_by_lr_sched")
    if type(optimizer) in FUSED:
        base, rule = FUSED[type(optimizer)]
        shard_in_place(optimizer, FusedWorker(rule(True), masters=None, moments=None, seed=0), base)
    else:
        shard_in_place(optimizer, _build_torch_worker(optimizer))
    if scheduled:
        _IdleScheduler(optimizer)
    return optimizer


def check_scheduler(scheduler: Any) -> None:
    """Check that somebody follows what a scheduler, or those it is made of, writes.

    Raises:
        ConfigError: its optimizer is over a sharded model, and was not adopted.
    """
    for part in getattr(scheduler, "_schedulers", ()):  # of a SequentialLR or a ChainedScheduler
        check_scheduler(part)
    seen = getattr(scheduler, "optimizer", None)
    optimizer = getattr(seen, "optimizer", seen)  # frameworks wrap optimizers
    if (
        optimizer is None
        or isinstance(optimizer, ZeroOptimizer)
        or not has_sharded_parameters(get_optimizer_parameters(optimizer))
    ):
        return
    raise ConfigError(
        type(scheduler).__name__,
        expected="a scheduler whose optimizer updates the sharded model",
        got=f"one of a {type(optimizer).__name__} that nobody has prepared",
        do="Prepare the optimizer before its scheduler, or with it, or make the scheduler of the one that is used.",
    )


@contextlib.contextmanager
def accumulate_gradients_locally(model: nn.Module) -> Iterator[None]:
    """Let the backward passes inside add up on each rank alone where the plan keeps gradients unsharded anyway.

    Where it shards them each is reduced as it comes, as ever: gradients are never larger than the plan says.
    """
    engine = engine_of(model)
    sharded = any(flat.plan.gradients.axes for flat in engine.flats())
    with contextlib.nullcontext() if sharded else no_sync(model):
        yield


def save_adopted(folder: Path, model: nn.Module, optimizer: Optimizer | None) -> None:
    """Write a checkpoint into ``folder``, and remove the one that was there once it is complete. Collective.

    Frameworks write to one place again and again; :func:`npuzero.checkpoint.save` never writes over a step.
    """
    world, number, problem = engine_of(model).mesh.world, 0, None
    try:
        last = checkpoint.latest(folder) if world.rank == 0 else None  # others may not see it yet
        number = 0 if last is None else int(last.name.rpartition("-")[2]) + 1
    except Exception as error:
        problem = error
    number = exchange_or_raise(world, f"save {folder}", problem, number)[0]
    checkpoint.save(folder, model, optimizer, step=number, rng=False, keep_last=1)


def load_adopted(folder: Path, model: nn.Module, optimizer: Optimizer | None) -> None:
    """Go on from what :func:`save_adopted` wrote; random numbers are the framework's business. Collective."""
    checkpoint.load(folder, model, optimizer, rng=False)


class _IdleScheduler(LRScheduler):
    """Have torch tell an optimizer's schedulers of its steps, as it has when one is made, and change nothing."""

    def step(self, epoch: int | None = None) -> None:
        """Do nothing."""


def _build_torch_worker(optimizer: Optimizer) -> TorchOptimizerWorker:
    """Return what updates shards by an optimizer's own class."""
    kind = type(optimizer)
    arguments = [
        name
        for name, argument in inspect.signature(kind).parameters.items()
        if argument.kind in (argument.POSITIONAL_OR_KEYWORD, argument.KEYWORD_ONLY)
    ][1:]
    unknown = [name for name in arguments if name not in optimizer.defaults]
    if unknown:
        raise ConfigError(
            kind.__name__,
            expected="an optimizer whose arguments are the options of its groups, so that it can be made again",
            got=f"arguments that it does not show: {', '.join(unknown)}",
            do=f"Build it as npuzero.ZeroOptimizer({kind.__name__}, parameters, ...) yourself.",
        )
    return TorchOptimizerWorker(kind, {name: optimizer.defaults[name] for name in arguments})


def get_optimizer_parameters(optimizer: Optimizer) -> list[nn.Parameter]:
    """Return the parameters of all groups."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def check_zero_options(door: str, options: object) -> dict[str, Any]:
    """Return the keyword arguments for :func:`npuzero.zero` that a door was given; {} for None.

    Raises:
        ConfigError: no mapping.
    """
    if options is None:
        return {}
    if not isinstance(options, Mapping):
        raise ConfigError(
            f"{door}: zero",
            expected="keyword arguments of npuzero.zero(), as a mapping",
            got=describe_value(options),
            do='Give e.g. zero={"stage": 2, "offload": "host"}.',
        )
    return dict(options)
