"""The door of Lightning: the strategy "npuzero", which importing this module registers.

Needs the package lightning, or pytorch-lightning, which nothing else here imports. Where a program has imported the
latter alone, the strategy is for that one.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

import torch

from npuzero import adopt
from npuzero.api import LossScaler, clip_grad_norm_, clip_grad_value_, full_state_dict, load_full_state_dict
from npuzero.errors import ConfigError


def _packages() -> tuple[Any, Any]:
    """Return the modules of strategies and of a trainer's states, of the package that is meant.

    Raises:
        PackageMissing: there is none.
    """
    homes = ["lightning.pytorch", "pytorch_lightning"]
    if "pytorch_lightning" in sys.modules and "lightning" not in sys.modules:
        homes.reverse()
    for home in homes:
        try:
            return import_module(f"{home}.strategies"), import_module(f"{home}.trainer.states")
        except ImportError as error:
            missing = error
    raise adopt.missing("npuzero.lightning", "lightning", missing) from missing


_strategies, _states = _packages()

__all__ = ["ZeroStrategy"]

#: What of a checkpoint is Lightning's: loops, callbacks, schedulers, hyperparameters.
_REST = "lightning.ckpt"


class ZeroStrategy(_strategies.DDPStrategy):  # type: ignore[name-defined]
    """Train a LightningModule whose training state is sharded: ``Trainer(strategy="npuzero")``.

    The module is sharded in place as a whole, when its layers are made (``__init__`` or ``configure_model``) and before
    ``configure_optimizers``; there is no wrapper. What ``configure_optimizers`` returns is put over the shards, and
    schedulers follow it. Precision is Lightning's (``"16-mixed"`` scales by :class:`npuzero.LossScaler`); so are
    clipping, accumulation, validation and early stopping.

    A checkpoint is a folder: each rank's shards, which any plan on any number of ranks can load, and Lightning's rest.
    With ``full_checkpoints`` it is one file as of any strategy, which ``load_from_checkpoint`` reads, gathered on rank
    0. Both kinds, and files of other strategies, are resumed from. Saving is collective: leave it to callbacks, or call
    ``trainer.save_checkpoint`` on every rank.

    Args:
        zero: keyword arguments of :func:`npuzero.zero`, such as ``{"stage": 2, "offload": "host"}``; None: stage 3.
        full_checkpoints: whether checkpoints are single files with unsharded tensors.
        kwargs: those of Lightning's DDPStrategy that are not DistributedDataParallel's.

    Example::

        trainer = Trainer(strategy=ZeroStrategy(zero={"stage": 2}), max_epochs=1, gradient_clip_val=1.0)
        trainer.fit(module, loader)
    """

    # Lightning's own.
    model: Any
    optimizers: list[Any]
    _lightning_module: Any

    def __init__(self, zero: Mapping[str, Any] | None = None, full_checkpoints: bool = False, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        refused = [*self._ddp_kwargs, *(name for name in kwargs if name.startswith(("ddp_", "model_averaging")))]
        if refused:
            raise ConfigError(
                "ZeroStrategy",
                expected="zero, full_checkpoints, and arguments of Lightning's strategies for several processes",
                got=", ".join(refused),
                do="Leave DistributedDataParallel's out: npuzero reduces the gradients, and zero={...} says how.",
            )
        self._zero = adopt.check_options("ZeroStrategy", zero)
        self._full = full_checkpoints
        self._shards: Path | None = None  # of the checkpoint that is being loaded

    # -- the module and its optimizers -----------------------------------------------------------------------------

    @property
    def precision_plugin(self) -> Any:
        """Return what computes in which precision, with clipping and a loss scale that shards understand."""
        return super().precision_plugin

    @precision_plugin.setter
    def precision_plugin(self, plugin: Any) -> None:
        if plugin is not None:
            plugin.clip_gradients = self._clip
            scaler = getattr(plugin, "scaler", None)
            if isinstance(scaler, torch.amp.GradScaler):
                plugin.scaler = _scaler_of(scaler)
        self._precision_plugin = plugin

    def setup(self, trainer: Any) -> None:
        """Shard the module, whatever the trainer is to do with it, and make its optimizers where it trains."""
        fits = trainer.state.fn == _states.TrainerFn.FITTING
        self.accelerator.setup(trainer)
        if fits and self._layer_sync:
            self.model = self._layer_sync.apply(self.model)
        self.model = adopt.shard(self.precision_plugin.convert_module(self.model), self.root_device, self._zero)
        if fits:
            self.setup_optimizers(trainer)
        else:  # whatever training has left each rank
            for buffer in self.model.buffers():
                torch.distributed.broadcast(buffer, 0)
        self.setup_precision_plugin()

    def setup_optimizers(self, trainer: Any) -> None:
        """Make optimizers and schedulers, and put the optimizers over the shards."""
        super().setup_optimizers(trainer)
        self.optimizers = [adopt.adopt(optimizer) for optimizer in self.optimizers]
        for config in self.lr_scheduler_configs:
            adopt.check_scheduler(config.scheduler)

    def teardown(self) -> None:
        """End as Lightning does, and leave the module where it is: it cannot be moved."""
        module, self._lightning_module = self._lightning_module, None
        super().teardown()
        self._lightning_module = module

    # -- a step ----------------------------------------------------------------------------------------------------

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module's step within a call of the module: that is its forward to npuzero. Not where the module steps
        its optimizers itself, which no forward does.
        """
        if not self.lightning_module.automatic_optimization:
            return super().training_step(*args, **kwargs)
        with self.precision_plugin.train_step_context():
            return self._within("training_step", *args, **kwargs)

    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module's step within a call of the module."""
        with self.precision_plugin.val_step_context():
            return self._within("validation_step", *args, **kwargs)

    def test_step(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module's step within a call of the module."""
        with self.precision_plugin.test_step_context():
            return self._within("test_step", *args, **kwargs)

    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module's step within a call of the module."""
        with self.precision_plugin.predict_step_context():
            return self._within("predict_step", *args, **kwargs)

    def _within(self, name: str, *args: Any, **kwargs: Any) -> Any:
        return self._forward_redirection(self.model, self.lightning_module, name, *args, **kwargs)

    @contextlib.contextmanager
    def block_backward_sync(self) -> Iterator[None]:
        """Send nothing inside, where the plan keeps gradients unsharded; the sums are the same anyway."""
        with adopt.accumulating(self.model):
            yield

    def _clip(self, optimizer: Any, clip_val: float = 0.0, gradient_clip_algorithm: Any = "norm") -> None:
        """Clip the gradients of the optimizer's parameters, in place of the precision plugin."""
        if clip_val <= 0:
            return
        scaler = getattr(self.precision_plugin, "scaler", None)
        if scaler is not None and getattr(optimizer, "_step_supports_amp_scaling", False):
            scaler.unscale_(optimizer)  # else the plugin has: it thinks that such an optimizer does it itself
        kind = getattr(gradient_clip_algorithm, "value", gradient_clip_algorithm)
        clip: Callable[..., object] = clip_grad_value_ if kind == "value" else clip_grad_norm_
        clip((parameter for group in optimizer.param_groups for parameter in group["params"]), clip_val)

    # -- checkpoints -----------------------------------------------------------------------------------------------

    @property
    def restore_checkpoint_after_setup(self) -> bool:
        """Return True: what is loaded goes into shards."""
        return True

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Return unsharded tensors on rank 0 for one file; {} for a folder, into which each rank writes its own."""
        return full_state_dict(self.lightning_module) if self._full else {}

    def optimizer_state(self, optimizer: Any) -> dict[str, Any]:
        """Return the state as torch's optimizer has it on rank 0 for one file; {} for a folder."""
        if not self._full and len(self.optimizers) == 1:
            return {}
        state: dict[str, Any] = getattr(optimizer, "_optimizer", optimizer).state_dict()
        return state if self.is_global_zero else {}

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        """Write a checkpoint. Collective."""
        path = Path(self.broadcast(filepath))
        if self._full:
            super().save_checkpoint(checkpoint, path, storage_options)
            return
        if self.is_global_zero and path.is_file():
            path.unlink()
        self.barrier()
        path.mkdir(parents=True, exist_ok=True)
        optimizer = _only(self.optimizers) if "optimizer_states" in checkpoint else None
        adopt.save(path / adopt.FOLDER, self.lightning_module, optimizer)
        super().save_checkpoint(checkpoint, path / _REST, storage_options)

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        """Read the part of a checkpoint that is Lightning's; the rest follows where it is asked for."""
        path = Path(self.broadcast(checkpoint_path))
        self._shards = path / adopt.FOLDER if path.is_dir() else None
        loaded: dict[str, Any] = super().load_checkpoint(path / _REST if self._shards else path, weights_only)
        return loaded

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Load the module's weights, and from a folder what its optimizer has. Collective.

        Raises:
            CheckpointError: they do not fit.
        """
        if self._shards is None:
            load_full_state_dict(self.lightning_module, checkpoint["state_dict"], strict)
            return
        with_states = self.optimizers and "optimizer_states" in checkpoint
        adopt.load(self._shards, self.lightning_module, _only(self.optimizers) if with_states else None)

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Load what optimizers have, unless it came with the weights."""
        for optimizer, state in zip(self.optimizers, checkpoint["optimizer_states"], strict=True):
            if state:
                optimizer.load_state_dict(state)

    @classmethod
    def register_strategies(cls, strategy_registry: Any) -> None:
        """Register "npuzero"."""
        strategy_registry.register("npuzero", cls, description="ZeRO stage 3, by npuzero", override=True)


def _only(optimizers: list[Any]) -> Any:
    """Return the optimizer whose shards go with the module's; None where several share it."""
    return optimizers[0] if len(optimizers) == 1 else None


def _scaler_of(scaler: torch.amp.GradScaler) -> LossScaler:
    """Return npuzero's scaler, with the settings of torch's."""
    return LossScaler(
        init_scale=scaler._init_scale,
        growth_factor=scaler.get_growth_factor(),
        backoff_factor=scaler.get_backoff_factor(),
        growth_interval=scaler.get_growth_interval(),
        enabled=scaler.is_enabled(),
    )


ZeroStrategy.register_strategies(_strategies.StrategyRegistry)
