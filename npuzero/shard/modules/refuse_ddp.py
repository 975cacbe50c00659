"""Refuse other engines around a sharded model: they would reduce gradients a second time."""

from __future__ import annotations

import functools
from typing import Any

from torch import nn
from torch.nn.parallel import DataParallel, DistributedDataParallel

from npuzero.errors import StateError
from npuzero.shard.modules.sharded_tensor import is_engine_parameter

# Names of other engines' constructors.
_ENGINES = (DistributedDataParallel.__name__, "FullyShardedDataParallel", "fully_shard", DataParallel.__name__)


def refuse_wrappers() -> None:
    """Patch the constructors of DistributedDataParallel and DataParallel to refuse a sharded model first."""
    for engine in (DistributedDataParallel, DataParallel):
        _guard_constructor(engine)


@functools.cache
def _guard_constructor(engine: type[nn.Module]) -> None:
    """Patch the constructor of ``engine``, once.

    No later check suffices: without a process group DDP fails before it reads the model, and on the CPU DataParallel
    only calls it.
    """
    plain: Any = engine.__init__

    @functools.wraps(plain)
    def init(self: nn.Module, module: nn.Module, *args: Any, **kwargs: Any) -> None:
        left_out = {*getattr(module, "_ddp_params_and_buffers_to_ignore", ())}
        named = module.named_parameters() if isinstance(module, nn.Module) else ()
        if any(is_engine_parameter(parameter) for name, parameter in named if name not in left_out):
            raise wrapped_model_error(engine.__name__)
        plain(self, module, *args, **kwargs)

    engine.__init__ = init  # type: ignore[method-assign]


def check_unwrapped() -> None:
    """Raise a StateError in a forward of a DistributedDataParallel that was made before :func:`npuzero.zero`."""
    around = DistributedDataParallel._active_ddp_module
    if around is not None and any(map(is_engine_parameter, around._module_parameters)):
        raise wrapped_model_error()


def refuse_reader(call: str) -> None:
    """Raise a StateError if ``call``, which reads an engine's parameter, is another engine's constructor."""
    for engine in _ENGINES:
        if engine in call.split("."):
            raise wrapped_model_error(engine)


def wrapped_model_error(engine: str = DistributedDataParallel.__name__) -> StateError:
    return StateError(
        f"{engine} around a model made by npuzero.zero()",
        expected="the model as npuzero.zero() returned it: it averages the gradients of all ranks itself",
        got="a second engine, which would do so once more",
        do=f"Leave {engine} out: npuzero.zero() replaces it. Where a trainer adds it, docs/frameworks.md says how for "
        "accelerate, transformers' Trainer and Lightning.",
    )
