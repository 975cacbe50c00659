"""Integration with accelerate: an Accelerator that shards the models it prepares.

Needs the package accelerate, which no other module of npuzero imports.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from npuzero import adopt
from npuzero.api import LossScaler, clip_grad_norm_, clip_grad_value_, export, full_state_dict
from npuzero.errors import ConfigError

try:
    from accelerate import Accelerator
    from accelerate.optimizer import AcceleratedOptimizer
    from accelerate.utils import DDPCommunicationHookType, DistributedType, GradScalerKwargs, convert_file_size_to_int
except ImportError as error:
    raise adopt.package_missing_error("npuzero.accelerate", "accelerate", error) from error

__all__ = ["ZeroAccelerator"]

#: accelerate's own options for sharding, as argument names and as distributed types.
_PLUGINS = (
    "deepspeed_plugin",
    "deepspeed_plugins",
    "fsdp_plugin",
    "megatron_lm_plugin",
    "torch_tp_plugin",
    "parallelism_config",
)
_OTHERS = (DistributedType.DEEPSPEED, DistributedType.FSDP, DistributedType.MEGATRON_LM, DistributedType.XLA)


class ZeroAccelerator(Accelerator):
    """Extend accelerate's Accelerator to shard the models that it prepares.

    A script changes only the line that creates its accelerator; ``accelerate launch``, torchrun and python start it as
    before. ``prepare`` shards a model in place (there is no wrapper), and makes its optimizer update the shards, also
    in place: parameter groups, attributes and schedulers stay the program's. Mixed precision is accelerate's autocast
    over float32 parameters; ``"fp16"`` scales the loss by :class:`npuzero.LossScaler`, also on CPU ranks.
    ``accumulate`` skips communication between steps if the plan keeps gradients unsharded.

    Methods that gather are collective: call ``get_state_dict``, ``save_model``, ``save_state``, ``load_state`` and
    ``clip_grad_norm_`` on every rank. A state written by ``save_state`` can be loaded under any plan and number of
    ranks.

    Args:
        zero: keyword arguments of :func:`npuzero.zero` for each model, such as ``{"stage": 2, "offload": "host"}``;
            None: stage 3.
        args, kwargs: accelerate's own.

    Raises:
        ConfigError: accelerate is configured for another kind of sharding (DeepSpeed, FSDP, Megatron-LM, tensor or
            context parallelism), or for fp8.

    Example::

        accelerator = ZeroAccelerator(zero={"stage": 3})
        model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
        for inputs, targets in loader:
            accelerator.backward(loss_of(model(inputs), targets))
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        accelerator.save_model(model, "weights")
    """

    # Attributes of accelerate's Accelerator.
    _models: list[nn.Module]
    _optimizers: list[Any]

    def __init__(self, *args: Any, zero: Mapping[str, Any] | None = None, **kwargs: Any) -> None:
        self._zero = adopt.check_zero_options("ZeroAccelerator", zero)
        asked = [name for name in _PLUGINS if kwargs.get(name) is not None]
        if not asked:
            super().__init__(*args, **kwargs)
            # `accelerate launch` may also request them through the environment.
            asked = [self.distributed_type.value] if self.distributed_type in _OTHERS else []
            asked += ["parallelism_config"] if self.parallelism_config is not None else []
            asked += ["fp8"] if self.fp8_enabled else []
            hook = DDPCommunicationHookType.NO if self.ddp_handler is None else self.ddp_handler.comm_hook
            asked += [] if hook == DDPCommunicationHookType.NO else ["comm_hook"]
        if asked:
            raise ConfigError(
                "ZeroAccelerator",
                expected="an accelerator that leaves sharding and dtypes to npuzero",
                got=", ".join(asked),
                do="Leave it out, and choose the plan by zero={...}; or keep accelerate's Accelerator.",
            )
        if self.ddp_handler is not None and not self.ddp_handler.broadcast_buffers:
            self._zero.setdefault("buffers", None)
        if self.mixed_precision == "fp16":
            self.native_amp = True
            self.scaler = LossScaler(**asdict(self.scaler_handler or GradScalerKwargs()))

    # -- prepare -------------------------------------------------------------------------------------------------------

    def prepare(self, *args: Any, device_placement: list[bool] | None = None) -> Any:
        """Prepare models first, independent of their position in ``args``: optimizers must see sharded parameters."""
        for each in args:
            if isinstance(each, nn.Module):
                self._shard(each)
        return super().prepare(*args, device_placement=device_placement)

    def prepare_model(
        self, model: nn.Module, device_placement: bool | None = None, evaluation_mode: bool = False
    ) -> nn.Module:
        """Shard a model for training. A model for evaluation only stays unsharded on each rank."""
        if not evaluation_mode:
            self._shard(model)
        sharded = adopt.is_sharded(model)
        # evaluation_mode=True skips DistributedDataParallel, and nothing else.
        return super().prepare_model(model, device_placement, evaluation_mode=evaluation_mode or sharded)

    def _shard(self, model: nn.Module) -> None:
        # An earlier prepare() for evaluation may have marked, compiled or wrapped it.
        adopt.shard_framework_model(self._inside(model), self.device, self._zero)

    def prepare_optimizer(
        self, optimizer: torch.optim.Optimizer, device_placement: bool | None = None
    ) -> torch.optim.Optimizer:
        """Make ``optimizer`` update shards if its parameters are sharded."""
        if getattr(optimizer, "_is_accelerate_prepared", False) or not adopt.has_sharded_parameters(
            adopt.get_optimizer_parameters(optimizer)
        ):
            return super().prepare_optimizer(optimizer, device_placement)
        prepared = ShardedOptimizer(adopt.adopt_optimizer(optimizer), device_placement=False, scaler=self.scaler)
        self._optimizers.append(prepared)
        return prepared

    def prepare_scheduler(self, scheduler: Any) -> Any:
        """Prepare a scheduler.

        Raises:
            ConfigError: its optimizer has sharded parameters and was not prepared.
        """
        adopt.check_scheduler(scheduler)
        return super().prepare_scheduler(scheduler)

    # -- a step ----------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def no_sync(self, model: nn.Module) -> Iterator[None]:
        """Skip communication inside the block if the plan keeps gradients unsharded; the sums do not change."""
        model = self._inside(model)
        with adopt.accumulate_gradients_locally(model) if adopt.is_sharded(model) else super().no_sync(model):
            yield

    @contextlib.contextmanager
    def join_uneven_inputs(self, joinables: Any, even_batches: bool | None = None) -> Iterator[None]:
        """Refuse uneven inputs for sharded models: all ranks must run the same units.

        Raises:
            ConfigError: one of ``joinables`` is sharded, and ``even_batches`` is not True.
        """
        if not any(map(adopt.is_sharded, joinables)):
            with super().join_uneven_inputs(joinables, even_batches=even_batches):
                yield
            return
        if not (self.even_batches if even_batches is None else even_batches):
            raise ConfigError(
                "ZeroAccelerator.join_uneven_inputs",
                expected="as many batches on each rank: a sharded model's forward is collective",
                got="even_batches=False",
                do="Leave even_batches True, or drop_last=True in the loader.",
            )
        yield

    def clip_grad_norm_(
        self, parameters: Iterable[nn.Parameter] | nn.Parameter, max_norm: float, norm_type: float = 2.0
    ) -> Tensor | None:
        """Clip ``parameters`` by the norm of their gradients over all ranks, as :func:`npuzero.clip_grad_norm_`."""
        given = _parameter_list(parameters)
        if not adopt.has_sharded_parameters(given):
            return super().clip_grad_norm_(given, max_norm, norm_type)
        self.unscale_gradients()
        return clip_grad_norm_(given, max_norm, norm_type)

    def clip_grad_value_(self, parameters: Iterable[nn.Parameter] | nn.Parameter, clip_value: float) -> None:
        """Clip each element of the gradients of ``parameters``, as :func:`npuzero.clip_grad_value_`."""
        given = _parameter_list(parameters)
        if not adopt.has_sharded_parameters(given):
            super().clip_grad_value_(given, clip_value)
            return
        self.unscale_gradients()
        clip_grad_value_(given, clip_value)

    # -- saving --------------------------------------------------------------------------------------------------------

    def get_state_dict(self, model: nn.Module, unwrap: bool = True) -> dict[str, Any]:
        """Return the unsharded state dict on rank 0, and {} on all other ranks. Collective for a sharded model."""
        inside = self._inside(model)
        if adopt.is_sharded(inside):
            return full_state_dict(inside)
        return super().get_state_dict(model, unwrap=unwrap)

    def save_model(
        self,
        model: nn.Module,
        save_directory: str | Path,
        max_shard_size: int | str = "10GB",
        safe_serialization: bool = True,
    ) -> None:
        """Write the unsharded weights with :func:`npuzero.export`, a piece at a time. Collective for a sharded model.

        Without ``safe_serialization`` (pickle), rank 0 holds all weights in memory.
        """
        inside = self._inside(model)
        if adopt.is_sharded(inside) and safe_serialization:
            export(inside, save_directory, file_bytes=convert_file_size_to_int(max_shard_size))
        else:
            super().save_model(model, save_directory, max_shard_size, safe_serialization)

    def save_state(
        self, output_dir: str | None = None, safe_serialization: bool = True, **save_model_func_kwargs: Any
    ) -> Any:
        """Save as accelerate does, with a checkpoint of npuzero for each sharded model and its optimizer. Collective.

        The checkpoint is in the same folder, and loads under any plan on any number of ranks.
        """
        with self._sharded_aside("_save_model_state_pre_hook", adopt.save_adopted):
            return super().save_state(output_dir, safe_serialization, **save_model_func_kwargs)

    def load_state(
        self,
        input_dir: str | None = None,
        load_kwargs: dict[str, Any] | None = None,
        **load_model_func_kwargs: Any,
    ) -> None:
        """Resume from a state written by :meth:`save_state`, on any number of ranks. Collective."""
        with self._sharded_aside("_load_model_state_pre_hook", adopt.load_adopted):
            super().load_state(input_dir, load_kwargs, **load_model_func_kwargs)

    @contextlib.contextmanager
    def _sharded_aside(
        self, hooks: str, act: Callable[[Path, nn.Module, torch.optim.Optimizer | None], object]
    ) -> Iterator[None]:
        """Hold sharded models back from accelerate; call ``act`` for each where it calls the user's ``hooks``."""
        models, optimizers, users = self._models, self._optimizers, getattr(self, hooks)
        sharded = [model for model in map(self._inside, models) if adopt.is_sharded(model)]
        paired = [(model, [each for each in optimizers if _updates_model(each, model)]) for model in sharded]
        # If several optimizers share a model, each is saved as accelerate saves torch's: it gathers its state.
        pairs = [(model, its[0] if len(its) == 1 else None) for model, its in paired]

        def hook(_: Any, *weights_and_folder: Any) -> None:
            for i, (model, optimizer) in enumerate(pairs):
                folder = Path(weights_and_folder[-1]) / adopt.FOLDER / str(i)
                act(folder, model, optimizer and optimizer.optimizer)
            for each in users.values():
                each(list(models), *weights_and_folder)

        self._models = [model for model in models if self._inside(model) not in sharded]
        self._optimizers = [each for each in optimizers if not any(each is optimizer for _, optimizer in pairs)]
        setattr(self, hooks, {0: hook})
        try:
            yield
        finally:
            self._models, self._optimizers = models, optimizers
            setattr(self, hooks, users)

    def _inside(self, model: nn.Module) -> nn.Module:
        """Return the module that was prepared, as passed to :func:`npuzero.zero`."""
        return self.unwrap_model(model, keep_torch_compile=False)


class ShardedOptimizer(AcceleratedOptimizer):
    """Wrap an optimizer with a loss scaler that decides on the device whether to skip a step."""

    _skipped_before = 0

    def step(self, closure: Callable[[], Any] | None = None) -> None:
        """Step if gradients are synchronized. Collective."""
        if self.scaler is None or not self.gradient_state.sync_gradients:
            super().step(closure)
            return
        self._skipped_before = self.scaler.skipped
        self.scaler.step(self.optimizer)
        self.scaler.update()

    @property
    def step_was_skipped(self) -> bool:
        """Return whether the last step found inf or NaN gradients. Waits for the device."""
        return self.scaler is not None and self.scaler.skipped > self._skipped_before


def _updates_model(optimizer: torch.optim.Optimizer, model: nn.Module) -> bool:
    mine = {id(parameter) for parameter in model.parameters()}
    return all(id(parameter) in mine for parameter in adopt.get_optimizer_parameters(optimizer))


def _parameter_list(parameters: Iterable[nn.Parameter] | nn.Parameter) -> list[nn.Parameter]:
    return [parameters] if isinstance(parameters, nn.Parameter) else list(parameters)
