"""Refusals of other engines around a sharded model: they would reduce once more what the ranks have summed already."""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from npuzero.errors import StateError
from npuzero.shard.guard import owned

# What other engines are called by.
_ENGINES = (DistributedDataParallel.__name__, "FullyShardedDataParallel", "fully_shard", "DataParallel")


class _Refusal:
    """Raise when DistributedDataParallel reads it: the names of the parameters it should leave alone."""

    def __iter__(self) -> Iterator[str]:
        raise wrapped()


def refuse_wrappers(model: nn.Module) -> None:
    """Have ``DistributedDataParallel(model)`` say why not, instead of broadcasting shards."""
    model.__dict__["_ddp_params_and_buffers_to_ignore"] = _Refusal()


def check_unwrapped() -> None:
    """Raise a StateError within a forward of DistributedDataParallel that has an engine's parameters, at any depth."""
    around = DistributedDataParallel._active_ddp_module
    if around is not None and any(map(owned, around._module_parameters)):
        raise wrapped()


def refuse_reader(call: str) -> None:
    """Raise StateError where ``call``, which reads a parameter of an engine, is another engine's constructor."""
    for engine in _ENGINES:
        if engine in call.split("."):
            raise wrapped(engine)


def wrapped(engine: str = DistributedDataParallel.__name__) -> StateError:
    return StateError(
        f"{engine} around a model made by npuzero.zero()",
        expected="the model as npuzero.zero() returned it: it averages the gradients of all ranks itself",
        got="a second engine, which would do so once more",
        do=f"Leave {engine} out: npuzero.zero() replaces it. Where a trainer adds it, docs/frameworks.md says how for "
        "accelerate, transformers' Trainer and Lightning.",
    )
