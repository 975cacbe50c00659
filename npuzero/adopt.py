"""Adoption of framework objects: shard a model in place, and its optimizer and schedulers with it.

The integrations with accelerate, transformers and Lightning use it. There the user creates model and optimizer from
torch's classes and the framework keeps references to them, so they must be changed in place.
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

#: The folder of npuzero's checkpoints inside a checkpoint of the framework.
FOLDER = "npuzero"


def package_missing_error(door: str, package: str, error: ImportError) -> PackageMissing:
    """Return the error for an integration (``door``) with a ``package`` that cannot be imported."""
    return PackageMissing(
        door,
        expected=f"the package {package}",
        got=str(error),
        do=f"pip install 'npuzero[frameworks]', or {package} alone.",
    )


def shard_framework_model(model: Model, device: torch.device, options: Mapping[str, Any]) -> Model:
    """Shard ``model`` with :func:`npuzero.zero` over the ranks that the framework has started. Idempotent.

    Args:
        model: on any device; it is moved to ``device`` first, unless any of its tensors is on meta. A model that
            :func:`npuzero.zero` has returned, or that has no parameters, is returned unchanged.
        device: this rank's device.
        options: keyword arguments of :func:`npuzero.zero`. By default buffers are broadcast from rank 0, as
            DistributedDataParallel does.

    Raises:
        ConfigError: a part of the model is already sharded separately, or :func:`npuzero.zero` refuses ``options``.
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
    """Return whether ``model`` was returned by :func:`npuzero.zero`."""
    return getattr(model, "_npuzero", None) is not None


def gathers_parameters(model: nn.Module) -> bool:
    """Return whether forward of ``model`` all-gathers parameters, so that every rank must run it equally often."""
    if not is_sharded(model):
        return False
    engine = engine_of(model)
    return engine.world.size > 1 and any(unit.guarded for unit in engine.units)


def has_sharded_parameters(parameters: Iterable[nn.Parameter]) -> bool:
    """Return whether any of ``parameters`` belongs to a sharded model."""
    return bool(split_by_engine(parameters)[0])


def adopt_optimizer(optimizer: Optimizer) -> Optimizer:
    """Make ``optimizer`` update the shards of its parameters, in place.

    torch's AdamW and Adam update as npuzero's do. Any other element-wise class updates each rank's shards. Groups,
    ``defaults``, hooks and attributes remain the same objects, and existing state is kept.

    Returns:
        ``optimizer``; unchanged if it is npuzero's or none of its parameters is sharded.

    Raises:
        ConfigError: it is not element-wise, cannot be rebuilt from its options, or the program has replaced its
            methods.
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
    """Check that a scheduler's optimizer, and those of the schedulers inside it, update the sharded model.

    Raises:
        ConfigError: its optimizer has sharded parameters and was not adopted.
    """
    for part in getattr(scheduler, "_schedulers", ()):  # in a SequentialLR or a ChainedScheduler
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
    """Add up gradients on each rank without communication inside the block, if the plan keeps them unsharded.

    If the plan shards gradients, each is still reduced in its backward: gradients never exceed the memory of the plan.
    """
    engine = engine_of(model)
    sharded = any(flat.plan.gradients.axes for flat in engine.flats())
    with contextlib.nullcontext() if sharded else no_sync(model):
        yield


def save_adopted(folder: Path, model: nn.Module, optimizer: Optimizer | None) -> None:
    """Write a checkpoint into ``folder``, and remove the previous one once the new one is complete. Collective.

    Frameworks overwrite one path repeatedly; :func:`npuzero.checkpoint.save` never overwrites a step.
    """
    world, number, problem = engine_of(model).mesh.world, 0, None
    try:
        last = checkpoint.latest(folder) if world.rank == 0 else None  # remaining ranks may not see it yet
        number = 0 if last is None else int(last.name.rpartition("-")[2]) + 1
    except Exception as error:
        problem = error
    number = exchange_or_raise(world, f"save {folder}", problem, number)[0]
    checkpoint.save(folder, model, optimizer, step=number, rng=False, keep_last=1)


def load_adopted(folder: Path, model: nn.Module, optimizer: Optimizer | None) -> None:
    """Load a checkpoint of :func:`save_adopted`, without random states, which the framework restores. Collective."""
    checkpoint.load(folder, model, optimizer, rng=False)


class _IdleScheduler(LRScheduler):
    """Make torch count an optimizer's steps, as it does for every scheduler, and change nothing."""

    def step(self, epoch: int | None = None) -> None:
        """Do nothing."""


def _build_torch_worker(optimizer: Optimizer) -> TorchOptimizerWorker:
    """Return the worker that updates shards with the optimizer's own class."""
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
    """Return the options for :func:`npuzero.zero` that an integration (``door``) received; {} for None.

    Raises:
        ConfigError: they are not a mapping.
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
