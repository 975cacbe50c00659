"""Integration with Lightning: the strategy "npuzero", registered by importing this module.

Needs the package lightning or pytorch-lightning, which no other module of npuzero imports. If the program has imported
only pytorch_lightning, the strategy is registered there.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from npuzero import adopt
from npuzero.api import LossScaler, clip_grad_norm_, clip_grad_value_, full_state_dict, gathered, load_full_state_dict
from npuzero.errors import ConfigError
from npuzero.shard.find_engine import engine_of
from npuzero.shard.modules.sharded_tensor import is_engine_parameter


def _import_lightning() -> tuple[Any, Any, Any]:
    """Import and return the strategies, trainer.states and callbacks modules of the installed package.

    Raises:
        PackageMissing: neither package is installed.
    """
    homes = ["lightning.pytorch", "pytorch_lightning"]
    if "pytorch_lightning" in sys.modules and "lightning" not in sys.modules:
        homes.reverse()
    for home in homes:
        try:
            strategies, states, callbacks = (
                import_module(f"{home}.{name}") for name in ("strategies", "trainer.states", "callbacks")
            )
            return strategies, states, callbacks
        except ImportError as error:
            missing = error
    raise adopt.package_missing_error("npuzero.lightning", "lightning", missing) from missing


_strategies, _states, _callbacks = _import_lightning()
#: EMA and other weight averaging; () before Lightning 2.6.
_WeightAveraging = getattr(_callbacks, "WeightAveraging", ())

__all__ = ["ZeroStrategy"]

#: Lightning's part of a checkpoint: loops, callbacks, schedulers, hyperparameters.
_REST = "lightning.ckpt"
#: The checkpoint key of WeightAveraging for the trained weights; the averaged weights are under ``state_dict``.
_CURRENT = "current_model_state"


class ZeroStrategy(_strategies.DDPStrategy):  # type: ignore[name-defined]
    """Train a LightningModule with a sharded training state: ``Trainer(strategy="npuzero")``.

    The full module is sharded in place, after its layers are created (``__init__`` or ``configure_model``) and before
    ``configure_optimizers``; there is no wrapper. Optimizers from ``configure_optimizers`` are adopted to update the
    shards, and schedulers follow them. Precision is Lightning's (``"16-mixed"`` scales by :class:`npuzero.LossScaler`),
    and so are clipping, accumulation, validation and early stopping.

    A checkpoint is a folder: each rank's shards, which load under any plan on any number of ranks, and Lightning's
    part. With ``full_checkpoints`` it is a single file as of any strategy, gathered on rank 0; ``load_from_checkpoint``
    reads it. Training resumes from both kinds, and from files of other strategies. Saving is collective: leave it to
    callbacks, or call ``trainer.save_checkpoint`` on every rank.

    Args:
        zero: keyword arguments of :func:`npuzero.zero`, such as ``{"stage": 2, "offload": "host"}``; None: stage 3.
        full_checkpoints: write checkpoints as single files with unsharded tensors.
        kwargs: arguments of Lightning's DDPStrategy that are not DistributedDataParallel's.

    Example::

        trainer = Trainer(strategy=ZeroStrategy(zero={"stage": 2}), max_epochs=1, gradient_clip_val=1.0)
        trainer.fit(module, loader)
    """

    # Attributes of Lightning's strategy.
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
        self._zero = adopt.check_zero_options("ZeroStrategy", zero)
        self._full = full_checkpoints
        self._shards: Path | None = None  # folder of shards in the checkpoint being loaded
        self._weights: tuple[Mapping[str, Any], bool, bool] | None = None  # for setup: weights, strict, with states
        self._adapted = _CallbackAdapter()
        self._ready = False  # setup has run: weights can be loaded at once

    # -- the module and its optimizers -----------------------------------------------------------------------------

    @property
    def precision_plugin(self) -> Any:
        """Return the precision plugin, with clipping and a loss scaler that work on shards."""
        return super().precision_plugin

    @precision_plugin.setter
    def precision_plugin(self, plugin: Any) -> None:
        if plugin is not None:
            plugin.clip_gradients = partial(_clip_gradients, plugin)
            scaler = getattr(plugin, "scaler", None)
            if isinstance(scaler, torch.amp.GradScaler):
                plugin.scaler = _build_loss_scaler(scaler)
        self._precision_plugin = plugin

    def setup_environment(self) -> None:
        """Start the ranks, and adapt the trainer's callbacks, which are set up next."""
        super().setup_environment()
        self._ready = False
        self._adapted.begin(self.lightning_module.trainer.callbacks, self)

    def setup(self, trainer: Any) -> None:
        """Shard the module, create its optimizers if it is to be fitted, and load pending checkpoint weights.

        Raises:
            ConfigError: a callback would read or write parameters in a way that the plan does not allow.
        """
        fits = trainer.state.fn == _states.TrainerFn.FITTING
        self.accelerator.setup(trainer)
        if fits and self._layer_sync:
            self.model = self._layer_sync.apply(self.model)
        self.model = self.precision_plugin.convert_module(self.model)
        with self._adapted.thawed():
            self.model = adopt.shard_framework_model(self.model, self.root_device, self._zero)
        self._adapted.gather_for(trainer.callbacks, self.lightning_module)
        if fits:
            self.setup_optimizers(trainer)
            for callback in trainer.callbacks:
                if isinstance(callback, _callbacks.BaseFinetuning):
                    callback.on_fit_start(trainer, self.lightning_module)  # restores the groups that it has added
        else:  # buffers may differ between ranks after training
            for buffer in self.model.buffers():
                torch.distributed.broadcast(buffer, 0)
        self.setup_precision_plugin()
        self._load_weights(fits)
        self._adapted.start_averages(self.lightning_module)
        self._ready = True

    def setup_optimizers(self, trainer: Any) -> None:
        """Create optimizers and schedulers, and make the optimizers update the shards."""
        super().setup_optimizers(trainer)
        self.optimizers = [adopt.adopt_optimizer(optimizer) for optimizer in self.optimizers]
        for config in self.lr_scheduler_configs:
            adopt.check_scheduler(config.scheduler)

    def teardown(self) -> None:
        """End as Lightning does, but leave the module in place: it cannot be moved."""
        self._adapted.end()
        self._weights = None
        module, self._lightning_module = self._lightning_module, None
        super().teardown()
        self._lightning_module = module

    # -- a step ----------------------------------------------------------------------------------------------------

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module's training step inside a call of the module, so that npuzero sees one forward.

        Manual optimization is excluded: there the step includes the optimizers' steps, which are not part of a forward.
        """
        if not self.lightning_module.automatic_optimization:
            return super().training_step(*args, **kwargs)
        with self.precision_plugin.train_step_context():
            return self._within("training_step", *args, **kwargs)

    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module's validation step inside a call of the module."""
        with self.precision_plugin.val_step_context():
            return self._within("validation_step", *args, **kwargs)

    def test_step(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module's test step inside a call of the module."""
        with self.precision_plugin.test_step_context():
            return self._within("test_step", *args, **kwargs)

    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module's predict step inside a call of the module."""
        with self.precision_plugin.predict_step_context():
            return self._within("predict_step", *args, **kwargs)

    def _within(self, name: str, *args: Any, **kwargs: Any) -> Any:
        return self._forward_redirection(self.model, self.lightning_module, name, *args, **kwargs)

    @contextlib.contextmanager
    def block_backward_sync(self) -> Iterator[None]:
        """Skip communication inside the block if the plan keeps gradients unsharded; the sums do not change."""
        with adopt.accumulate_gradients_locally(self.model):
            yield

    # -- checkpoints -----------------------------------------------------------------------------------------------

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Return the unsharded tensors on rank 0 for a single file; {} for a folder of shards."""
        return full_state_dict(self.lightning_module) if self._full else {}

    def optimizer_state(self, optimizer: Any) -> dict[str, Any]:
        """Return the unsharded optimizer state on rank 0 for a single file; {} for a folder."""
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
        optimizer = _get_single_optimizer(self.optimizers) if "optimizer_states" in checkpoint else None
        adopt.save_adopted(path / adopt.FOLDER, self.lightning_module, optimizer)
        super().save_checkpoint(checkpoint, path / _REST, storage_options)

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        """Read Lightning's part of a checkpoint. Model and optimizer states are loaded later."""
        path = Path(self.broadcast(checkpoint_path))
        self._shards = path / adopt.FOLDER if path.is_dir() else None
        loaded: dict[str, Any] = super().load_checkpoint(path / _REST if self._shards else path, weights_only)
        return loaded

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Store the weights of a checkpoint until the module is sharded.

        :meth:`setup` loads them, and from a folder also the optimizer states.
        """
        weights = checkpoint["state_dict"] if self._shards is None or _CURRENT in checkpoint else {}
        self._weights = weights, strict, "optimizer_states" in checkpoint
        if self._ready:  # during a run, as LearningRateFinder does
            self._load_weights(bool(self.optimizers))

    def _load_weights(self, fits: bool) -> None:
        """Load the weights stored by :meth:`load_model_state_dict`. Collective.

        Raises:
            CheckpointError: they do not fit the model.
        """
        if self._weights is None:
            return
        (weights, strict, with_states), self._weights = self._weights, None
        if self._shards is not None:
            adopt.load_adopted(
                self._shards,
                self.lightning_module,
                _get_single_optimizer(self.optimizers) if fits and with_states else None,
            )
        if self._shards is None or weights:
            load_full_state_dict(self.lightning_module, weights, strict)

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Load the optimizer states, unless they were loaded with the weights."""
        for optimizer, state in zip(self.optimizers, checkpoint["optimizer_states"], strict=True):
            if state:
                optimizer.load_state_dict(state)

    @classmethod
    def register_strategies(cls, strategy_registry: Any) -> None:
        """Register "npuzero"."""
        strategy_registry.register("npuzero", cls, description="ZeRO stage 3, by npuzero", override=True)


class _CallbackAdapter:
    """Enable Lightning's callbacks that read, write or freeze parameters to work on sharded ones.

    Methods are replaced on the callbacks from :meth:`begin` to :meth:`end`.
    """

    def __init__(self) -> None:
        self._replaced: list[tuple[object, str]] = []
        self._frozen: list[nn.Parameter] = []  # by callbacks that unfreeze them later
        self._unaveraged: list[Any] = []  # callbacks without an average in the checkpoint

    def begin(self, callbacks: list[Any], strategy: ZeroStrategy) -> None:
        """Replace the methods of ``callbacks`` that run before the module is sharded or unfreeze it."""
        self.end()
        for callback in callbacks:
            if isinstance(callback, _callbacks.BaseFinetuning):
                self._replace(callback, "setup", self._note_frozen)
                self._replace(callback, "finetune_function", _compare_by_identity)
            elif isinstance(callback, _callbacks.StochasticWeightAveraging):
                self._replace(callback, "setup", _set_up_to_fit)
            elif isinstance(callback, _WeightAveraging):
                self._replace(callback, "on_load_checkpoint", partial(self._load_average, callback, strategy))

    def gather_for(self, callbacks: list[Any], module: nn.Module) -> None:
        """Make averaging ``callbacks`` see the unsharded parameters of the sharded ``module``.

        Raises:
            ConfigError: they would read or write rounded values.
        """
        inside = partial(_run_gathered, module)
        for callback in callbacks:
            if isinstance(callback, _callbacks.StochasticWeightAveraging):
                _check_averaged(callback, module, swapped=False)
                self._replace(callback, "update_parameters", inside)
                self._replace(callback, "transfer_weights", inside)
            elif isinstance(callback, _WeightAveraging) and callback._average_model is not None:
                _check_averaged(callback, module, swapped=True)
                self._replace(callback._average_model, "update_parameters", inside)
                self._replace(callback, "_swap_models", inside)
                self._replace(callback, "_copy_average_to_current", inside)

    @contextlib.contextmanager
    def thawed(self) -> Iterator[None]:
        """Enable gradients of parameters frozen by callbacks inside the block, so that sharding allocates them."""
        frozen, self._frozen = self._frozen, []
        for parameter in frozen:
            parameter.requires_grad_(True)
        yield
        for parameter in frozen:
            parameter.requires_grad_(False)

    def start_averages(self, module: nn.Module) -> None:
        """Start averages missing in the checkpoint from its weights, as Lightning does. Collective."""
        for callback in self._unaveraged:
            callback._average_model.update_parameters(module)
            callback._average_model.n_averaged.zero_()
        self._unaveraged = []

    def end(self) -> None:
        """Restore the callbacks' own methods."""
        for owner, name in self._replaced:
            vars(owner).pop(name)
        self._replaced, self._frozen, self._unaveraged = [], [], []

    def _replace(self, owner: object, name: str, around: Callable[..., Any]) -> None:
        vars(owner)[name] = partial(around, getattr(owner, name))
        self._replaced.append((owner, name))

    def _note_frozen(self, setup: Callable[..., None], trainer: Any, module: nn.Module, **stage: Any) -> None:
        trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
        setup(trainer, module, **stage)
        if not adopt.is_sharded(module):
            self._frozen += [parameter for parameter in trained if not parameter.requires_grad]

    def _load_average(
        self,
        callback: Any,
        strategy: ZeroStrategy,
        load: Callable[..., None],
        trainer: Any,
        _: nn.Module,
        checkpoint: dict[str, Any],
    ) -> None:
        """Load the average with WeightAveraging, and hand the module's weights to ``strategy`` to load later."""
        strict = strategy.lightning_module.strict_loading
        keep = partial(strategy.load_model_state_dict, strict=strict)
        load(
            trainer,
            SimpleNamespace(load_state_dict=lambda state: keep({**checkpoint, "state_dict": state})),
            checkpoint,
        )
        if callback._average_model is not None and _CURRENT not in checkpoint:
            self._unaveraged.append(callback)


class _CompareByIdentity(TorchFunctionMode):
    """Make ``torch.equal`` compare two parameters of a sharded model by identity."""

    def __torch_function__(self, func: Any, _: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.equal and all(isinstance(each, nn.Parameter) and is_engine_parameter(each) for each in args):
            return args[0] is args[1]
        return func(*args, **(kwargs or {}))


def _compare_by_identity(finetune: Callable[..., None], *args: Any, **kwargs: Any) -> None:
    """Run BaseFinetuning's function, which uses ``torch.equal`` to find the parameters that an optimizer lacks."""
    with _CompareByIdentity():
        finetune(*args, **kwargs)


def _run_gathered(module: nn.Module, method: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
    with gathered(module) if adopt.is_sharded(module) else contextlib.nullcontext():
        method(*args, **kwargs)


def _set_up_to_fit(setup: Callable[..., None], trainer: Any, module: nn.Module, **stage: Any) -> None:
    """Run setup, which copies the module, only for training, which averages: a sharded module cannot be copied."""
    if trainer.state.fn == _states.TrainerFn.FITTING:
        setup(trainer, module, **stage)


def _check_averaged(callback: object, module: nn.Module, swapped: bool) -> None:
    """Check that a callback may average the parameters of ``module``, and write them.

    Args:
        swapped: whether the callback swaps the average with the parameters and back.

    Raises:
        ConfigError: the plan sends rounded parameters, updates them late, or has masters that swapping would round.
    """
    if not adopt.is_sharded(module):
        return
    flats = list(engine_of(module).flats())
    why = {
        "lag=1: an update is pending while they are averaged": any(flat.plan.lag for flat in flats),
        "gathers that round them (precision.gathers)": any(flat.plan.precision.gathers for flat in flats),
        "masters beside rounded parameters, which a swap would round": swapped and any(flat.exact for flat in flats),
    }
    for got in (text for text, found in why.items() if found):
        raise ConfigError(
            type(callback).__name__,
            expected="parameters that it can read and write as they are",
            got=f"a plan with {got}",
            do='Take such a plan without it, e.g. zero={"stage": 3} and Trainer(precision="bf16-mixed"), or train '
            "without this callback.",
        )


def _clip_gradients(plugin: Any, optimizer: Any, clip_val: float = 0.0, gradient_clip_algorithm: Any = "norm") -> None:
    """Clip the gradients of the optimizer's parameters, in place of the precision plugin's method."""
    if clip_val <= 0:
        return
    scaler = getattr(plugin, "scaler", None)
    if scaler is not None and getattr(optimizer, "_step_supports_amp_scaling", False):
        scaler.unscale_(optimizer)  # otherwise the plugin already did
    kind = getattr(gradient_clip_algorithm, "value", gradient_clip_algorithm)
    clip: Callable[..., object] = clip_grad_value_ if kind == "value" else clip_grad_norm_
    clip((parameter for group in optimizer.param_groups for parameter in group["params"]), clip_val)


def _get_single_optimizer(optimizers: list[Any]) -> Any:
    """Return the optimizer that is saved with the module's shards; None if several optimizers share the module."""
    return optimizers[0] if len(optimizers) == 1 else None


def _build_loss_scaler(scaler: torch.amp.GradScaler) -> LossScaler:
    """Return an npuzero.LossScaler with the settings of torch's scaler."""
    return LossScaler(
        init_scale=scaler._init_scale,
        growth_factor=scaler.get_growth_factor(),
        backoff_factor=scaler.get_backoff_factor(),
        growth_interval=scaler.get_growth_interval(),
        enabled=scaler.is_enabled(),
    )


ZeroStrategy.register_strategies(_strategies.StrategyRegistry)
