"""An engine with DeepSpeed's methods, over a model that npuzero has sharded."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from npuzero.api import clip_grad_norm_, no_sync, skip_nonfinite_
from npuzero.comm import World
from npuzero.compat.deepspeed.facts import EngineFacts
from npuzero.compat.deepspeed.recipe import EngineRecipe
from npuzero.compat.deepspeed.saving import EngineCheckpoints
from npuzero.compat.translation import Translation
from npuzero.config import describe_value
from npuzero.errors import ConfigError, NonFiniteError, StateError, did_you_mean
from npuzero.optim import LossScaler


class DeepSpeedEngine(nn.Module, EngineFacts, EngineCheckpoints):
    """Train a model by ``engine(x)``, ``engine.backward(loss)``, ``engine.step()``, as DeepSpeed's engine does.

    Made by :func:`npuzero.initialize`. Attributes that the engine lacks are read from the model.

    Attributes:
        module: the sharded model.
        optimizer: npuzero's, over the model's parameters; None if the engine is for inference.
        lr_scheduler: stepped once per update; None without a schedule.
        training_dataloader: None without data.
        global_steps: updates tried, including skipped ones.
        global_samples: samples of these updates, on all ranks.
        micro_steps: calls of :meth:`step`.
        skipped_steps: updates skipped for gradients that were inf or NaN.
    """

    def __init__(
        self,
        module: nn.Module,
        optimizer: torch.optim.Optimizer | None,
        schedule: Any,
        loader: Any,
        recipe: EngineRecipe,
        world: World,
        translation: Translation,
    ) -> None:
        super().__init__()
        self.module = module
        self.optimizer, self.lr_scheduler, self.training_dataloader = optimizer, schedule, loader
        self.recipe, self.batch, self.translation, self.world = recipe, recipe.batch, translation, world
        self.scaler = None if recipe.scale is None or optimizer is None else LossScaler(**recipe.scale)
        self.global_steps = self.global_samples = self.micro_steps = self.skipped_steps = 0
        self._applied = False
        self._norm: Tensor | None = None
        self._boundary: bool | None = None  # set by the program; None: decided by the count of passes
        self._passes = 0  # backward passes since the last update
        self._alone = False  # inside no_sync()

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name == "module":
                raise
            if not hasattr(type(self.module), name) and not hasattr(self.module, name):
                model = type(self.module).__name__
                do = did_you_mean(name, dir(type(self)), "docs/deepspeed.md names what the engine has.")
                text = f"npuzero's DeepSpeed engine has no attribute {name!r}, and neither has the {model} in it. {do}"
                raise AttributeError(text, name=name, obj=self) from None
            return getattr(self.module, name)

    def forward(self, *inputs: Any, **options: Any) -> Any:
        """Call the model."""
        cast = self.recipe.autocast
        with contextlib.nullcontext() if cast is None else torch.autocast(self.device.type, dtype=cast):
            return self.module(*inputs, **options)

    def scale(self, loss: Tensor) -> Tensor:
        """Return the loss divided by the passes of a step, and scaled; call ``backward()`` on it.

        Raises:
            StateError: the engine has no optimizer.
        """
        self._check_optimizer("engine.scale")
        self._passes += 1
        mean = loss / self.batch.accumulation
        return mean if self.scaler is None else self._scaled(mean)

    def backward(self, loss: Tensor, retain_graph: bool = False, scale_wrt_gas: bool = True) -> Tensor:
        """Run a backward pass.

        Args:
            loss: a scalar.
            retain_graph: as in torch.
            scale_wrt_gas: whether to divide the loss by the passes of a step.

        Returns:
            The divided loss.

        Raises:
            ConfigError: ``loss`` is no scalar computed from the model.
            StateError: the engine has no optimizer.
        """
        self._check_optimizer("engine.backward")
        if not isinstance(loss, Tensor) or loss.numel() != 1 or loss.grad_fn is None:
            raise ConfigError(
                "engine.backward",
                expected="a scalar tensor that autograd has computed",
                got=describe_value(loss),
                do="Pass the loss; for other outputs call engine.scale(loss).backward().",
            )
        mean = loss / self.batch.accumulation if scale_wrt_gas else loss
        self._passes += 1
        (mean if self.scaler is None else self._scaled(mean)).backward(retain_graph=retain_graph)
        return mean

    def is_gradient_accumulation_boundary(self) -> bool:
        """Return whether the next :meth:`step` updates: the last pass of a step has run, or is running.

        False if ``managed_gradient_accumulation`` is false, since the engine cannot know.
        """
        if not self.recipe.conduct.managed:
            return False
        return (self.micro_steps + 1) % self.batch.accumulation == 0 if self._boundary is None else self._boundary

    def set_gradient_accumulation_boundary(self, is_boundary: bool) -> None:
        """Set whether the next :meth:`step` calls update, instead of counting passes.

        Raises:
            StateError: ``managed_gradient_accumulation`` is false, and every step updates.
        """
        if not self.recipe.conduct.managed:
            raise StateError(
                "set_gradient_accumulation_boundary",
                expected="an engine that manages accumulation",
                got="managed_gradient_accumulation = false",
                do="Call engine.step() where an update is due, and nothing else.",
            )
        self._boundary = is_boundary

    def step(self, lr_kwargs: dict[str, Any] | None = None) -> None:
        """End a micro-batch; at the last one of a step clip, update, and step the schedule. Collective.

        In dtypes with a loss scale or ``check_grad_overflow``, every rank skips an update with gradients that are inf
        or NaN, and the schedule stays where it is.

        Args:
            lr_kwargs: for the schedule's ``step``.

        Raises:
            StateError: the engine has no optimizer; the call is inside :meth:`no_sync`; or there was no backward pass
                since the last update.
            NonFiniteError: gradients overflow at the least loss scale.
        """
        self._check_optimizer("engine.step")
        if self._alone:
            raise StateError(
                "engine.step", expected="a call outside no_sync()", got="one inside", do="Leave the block before."
            )
        if not self.recipe.conduct.managed or self.is_gradient_accumulation_boundary():
            self._update(lr_kwargs or {})
        else:
            self._applied = False
        self.micro_steps += 1

    def was_step_applied(self) -> bool:
        """Return whether the last :meth:`step` changed parameters."""
        return self._applied

    def get_global_grad_norm(self) -> float | None:
        """Return the global norm of the gradients of the last update, before clipping. None before the first update, or
        if ``compute_grad_norm`` is false.
        """
        return None if self._norm is None else float(self._norm)

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Sum gradients locally inside the block, as DeepSpeed allows where gradients are not sharded.

        Raises:
            StateError: gradients are sharded.
        """
        if self.recipe.plan.gradients.axes:
            raise StateError(
                "engine.no_sync",
                expected="gradients that are not sharded: stage 0 or 1",
                got=f"zero_optimization.stage = {self.recipe.stage}",
                do="Leave it out: each pass reduces its own; or call npuzero.no_sync(engine.module), at its memory.",
            )
        self._alone = True
        try:
            with no_sync(self.module):
                yield
        finally:
            self._alone = False

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the gradients."""
        if self.optimizer is not None:
            self.optimizer.zero_grad(set_to_none)
        self._passes = 0

    def destroy(self) -> None:
        """Do nothing: Python frees the engine's memory with its last reference."""

    def _check_optimizer(self, call: str) -> None:
        """Raise StateError if the engine was made for inference."""
        if self.optimizer is None:
            raise StateError(
                call,
                expected="an engine with an optimizer",
                got="one for inference: neither optimizer= nor the key 'optimizer' was given to npuzero.initialize",
                do='Pass optimizer=, or say {"optimizer": {"type": "AdamW", "params": {"lr": 1e-4}}}.',
            )

    def _scaled(self, loss: Tensor) -> Tensor:
        assert self.scaler is not None
        scaled: Tensor = self.scaler.scale(loss)
        return scaled

    def _update(self, lr_kwargs: dict[str, Any]) -> None:
        if not self._passes:
            raise StateError(
                "engine.step",
                expected="engine.backward(loss) before it",
                got="no pass since the last update",
                do="Run loss = engine(x); engine.backward(loss); engine.step(): a bare loss.backward() is not scaled.",
            )
        samples = self.batch.total
        if not self.recipe.conduct.managed:
            samples = self.batch.micro * self.batch.world * self._passes
        self._applied = self._take_step()
        self.skipped_steps += not self._applied
        self.zero_grad()
        if self._applied and self.lr_scheduler is not None:
            self.lr_scheduler.step(**lr_kwargs)
        self.global_steps += 1
        self.global_samples += samples

    def _measure(self) -> None:
        clip = self.recipe.conduct.clip
        if clip > 0 or self.recipe.conduct.measures_norm:
            norm = clip_grad_norm_(self._optimized(), clip if clip > 0 else torch.inf)
            self._norm = norm if self.recipe.conduct.measures_norm else None

    def _optimized(self) -> list[nn.Parameter]:
        """Return the parameters of the optimizer; only their gradients are measured and clipped."""
        return [parameter for group in self.optimizer.param_groups for parameter in group["params"]]

    def _take_step(self) -> bool:
        """Take a step unless gradients are inf or NaN; return whether it was taken.

        Where a step may be skipped the host waits for the device, as in DeepSpeed, because the schedule needs the
        result.
        """
        if self.scaler is not None:
            self.scaler.unscale_(self.optimizer)
            self._measure()
            return self._step_scaled(self.scaler)
        skipped = skip_nonfinite_(self._optimized()) if self.recipe.conduct.skips else None
        self._measure()
        self.optimizer.step()
        return skipped is None or not bool(skipped)

    def _step_scaled(self, scaler: LossScaler) -> bool:
        before, skipped = scaler.get_scale(), scaler.skipped
        scaler.step(self.optimizer)
        scaler.update()
        now = scaler.state_dict()
        applied = scaler.skipped == skipped
        least = now["floor"] < now["ceiling"] and before == now["scale"] == now["floor"] and not now["_patience"]
        if least and not applied:
            raise NonFiniteError(
                "engine.step",
                expected="gradients that are finite at some loss scale",
                got=f"inf or NaN at the least one, {before:g}",
                do="Look at the loss and the learning rate, or train in bf16.",
            )
        return applied
