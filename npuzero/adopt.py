"""Adoption: what a framework hands over (a model, its optimizer, its schedulers) becomes npuzero's.

The doors of accelerate, transformers and Lightning are built of it. A framework makes these objects by the user's own
lines, of torch's classes, and holds on to them: so a model is sharded in place, an optimizer gets an *heir* that shares
its param_groups, and a scheduler is pointed at the heir.
"""

from __future__ import annotations

import contextlib
import inspect
import itertools
import types
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NoReturn, TypeVar, cast

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from npuzero import checkpoint
from npuzero.api import Adam, AdamW, ZeroOptimizer, init, no_sync, zero
from npuzero.config import describe
from npuzero.errors import ConfigError, PackageMissing, StateError
from npuzero.shard.everyone import agree
from npuzero.shard.ownership import engine_of, owners

Model = TypeVar("Model", bound=nn.Module)

#: Optimizers of torch that have a class of their own here; any other is a ZeroOptimizer over its class.
OWN: dict[type[Optimizer], Callable[..., ZeroOptimizer]] = {torch.optim.AdamW: AdamW, torch.optim.Adam: Adam}

#: The folder for checkpoints of sharded models, within what a framework saves.
FOLDER = "npuzero"

_HEIR = "_npuzero_heir"


def missing(door: str, package: str, error: ImportError) -> PackageMissing:
    """Return the error that ``package``, behind ``door``, cannot be imported."""
    return PackageMissing(
        door,
        expected=f"the package {package}",
        got=str(error),
        do=f"pip install 'npuzero[frameworks]', or {package} alone.",
    )


def shard(model: Model, device: torch.device, options: Mapping[str, Any]) -> Model:
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
    if owners(model.parameters())[0]:
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


def over_sharded(parameters: Iterable[nn.Parameter]) -> bool:
    """Tell whether any of ``parameters`` is of a sharded model."""
    return bool(owners(parameters)[0])


def adopt(optimizer: Optimizer) -> Optimizer:
    """Return the optimizer that updates the sharded parameters of ``optimizer`` in its stead: its *heir*.

    torch's AdamW and Adam have npuzero's; any other class that is element-wise is put over the shards as it is. The
    heir has the same param_groups, the very dicts, and the state there was: what a scheduler that nobody has told, or
    the user, writes into the old one's groups is what the heir follows. The old one's ``step()`` is refused.

    Returns:
        ``optimizer`` itself, where it is npuzero's or none of its parameters is sharded.

    Raises:
        ConfigError: it is not element-wise, or cannot be made again from its options.
    """
    heir = getattr(optimizer, _HEIR, None)
    if heir is not None:
        return cast(Optimizer, heir)
    if isinstance(optimizer, ZeroOptimizer) or not over_sharded(parameters_of(optimizer)):
        return optimizer
    state = optimizer.state_dict() if optimizer.state else None
    own = OWN.get(type(optimizer))
    heir = own(optimizer.param_groups) if own else _over(type(optimizer), optimizer)
    if state is not None:
        heir.load_state_dict(state)
    optimizer.param_groups = heir.param_groups
    setattr(optimizer, _HEIR, heir)
    optimizer.step = types.MethodType(_refuse_step, optimizer)  # type: ignore[method-assign]
    optimizer._opt_called = True  # type: ignore[attr-defined] # its schedulers do not warn that it never steps
    return heir


def repoint(scheduler: Any) -> None:
    """Point a scheduler, and those it is made of, at the heir of its optimizer.

    Raises:
        ConfigError: its optimizer is over a sharded model, and has no heir: nobody would see what it writes.
    """
    for part in getattr(scheduler, "_schedulers", ()):  # of a SequentialLR or a ChainedScheduler
        repoint(part)
    seen = getattr(scheduler, "optimizer", None)
    if seen is None:
        return
    optimizer = getattr(seen, "optimizer", seen)  # frameworks wrap optimizers
    heir = getattr(optimizer, _HEIR, None)
    if heir is not None:
        scheduler.optimizer = heir
        _Follower(heir)
    elif not isinstance(optimizer, ZeroOptimizer) and over_sharded(parameters_of(optimizer)):
        raise ConfigError(
            type(scheduler).__name__,
            expected="a scheduler whose optimizer updates the sharded model",
            got=f"one of a {type(optimizer).__name__} that nobody has prepared",
            do="Prepare the optimizer before its scheduler, or with it, or make the scheduler of the one that is used.",
        )


@contextlib.contextmanager
def accumulating(model: nn.Module) -> Iterator[None]:
    """Let the backward passes inside add up on each rank alone where the plan keeps gradients unsharded anyway.

    Where it shards them each is reduced as it comes, as ever: gradients are never larger than the plan says.
    """
    engine = engine_of(model)
    sharded = any(flat.plan.gradients.axes for flat in engine.flats())
    with contextlib.nullcontext() if sharded else no_sync(model):
        yield


def save(folder: Path, model: nn.Module, optimizer: Optimizer | None) -> None:
    """Write a checkpoint into ``folder``, and remove the one that was there once it is complete. Collective.

    Frameworks write to one place again and again; :func:`npuzero.checkpoint.save` never writes over a step.
    """
    world, number, problem = engine_of(model).mesh.world, 0, None
    try:
        last = checkpoint.latest(folder) if world.rank == 0 else None  # others may not see it yet
        number = 0 if last is None else int(last.name.rpartition("-")[2]) + 1
    except Exception as error:
        problem = error
    number = agree(world, f"save {folder}", problem, number)[0]
    checkpoint.save(folder, model, optimizer, step=number, rng=False, keep_last=1)


def load(folder: Path, model: nn.Module, optimizer: Optimizer | None) -> None:
    """Go on from what :func:`save` wrote; random numbers are the framework's business. Collective."""
    checkpoint.load(folder, model, optimizer, rng=False)


class _Follower(LRScheduler):
    """Have torch tell an optimizer's schedulers of its steps, as it has when one is made, and change nothing."""

    def step(self, epoch: int | None = None) -> None:
        """Do nothing."""


def _over(kind: type[Optimizer], optimizer: Optimizer) -> ZeroOptimizer:
    """Return the heir of an optimizer that has no class of its own here."""
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
    options = {name: optimizer.defaults[name] for name in arguments}
    return ZeroOptimizer(kind, optimizer.param_groups, **options)


def parameters_of(optimizer: Optimizer) -> list[nn.Parameter]:
    """Return the parameters of all groups."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def _refuse_step(optimizer: Optimizer, *_: object, **__: object) -> NoReturn:
    raise StateError(
        f"{type(optimizer).__name__}.step",
        expected="the optimizer that the framework uses, which updates the sharded model",
        got="the one it was made from",
        do="Step what prepare() returned.",
    )


_refuse_step._wrapped_by_lr_sched = True  # type: ignore[attr-defined] # as torch marks the steps that schedulers know of


def check_options(door: str, options: object) -> dict[str, Any]:
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
            got=describe(options),
            do='Give e.g. zero={"stage": 2, "offload": "host"}.',
        )
    return dict(options)
