"""Loss scaling with the interface of ``torch.amp.GradScaler``, over sharded models and plain parameters."""

from __future__ import annotations

import enum
import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch._compile import _disable_dynamo

from npuzero.arguments import as_number, check_flag
from npuzero.errors import CheckpointError, ConfigError, StateError, refuse_unknown_keywords
from npuzero.optim.scaling.loss_scale import DeferredLossScale, LossScale
from npuzero.shard.engine import Engine
from npuzero.shard.find_engine import engine_behind


class _ScalerStage(enum.Enum):
    UNSCALED = "unscaled"
    STEPPED = "stepped"


def _check_scaler_number(name: str, value: object, expected: str, holds: Callable[[float], bool]) -> float:
    return as_number(f"LossScaler: {name}", value, expected, "Correct it.", holds=holds)


def _check_scaler_count(name: str, value: object, least: int) -> int:
    return int(_check_scaler_number(name, value, f"at least {least}", lambda n: n.is_integer() and least <= n < 2**31))


@refuse_unknown_keywords(min_scale="floor", max_scale="ceiling", initial_scale="init_scale")
class LossScaler:
    """Scale the loss, so that small float16 gradients do not vanish, and skip steps that overflow.

    It replaces ``torch.amp.GradScaler``, which cannot read sharded gradients.

    All ranks decide the same: a gradient that is inf or NaN on any rank skips the step on all, and parameters, masters
    and moments stay as they are. Over a sharded model, :class:`npuzero.AdamW` and ``Adam`` never make the host wait:
    the device alone knows whether a step was taken and how many were (for the bias correction). The same holds over
    plain parameters with ``fused=True`` or ``capturable=True``, and for torch's optimizers with these options. All
    other optimizers wait for the decision, as under torch's scaler.

    Over a pipeline each rank makes an equal scaler: the last stage scales its loss, every other method is called on all
    ranks, and an overflow in one stage skips the step of all.

    DeepSpeed ends a run that overflows at its least scale: ``npuzero.FiniteGuard(model, scaler)`` does so at the floor.

    Args:
        device: accepted for compatibility with torch; the scale is on the device of the first loss.
        init_scale: the first scale.
        growth_factor, growth_interval: the factor of the scale after this many steps without an overflow.
        backoff_factor: the factor of the scale at an overflow.
        enabled: False makes every call do as without a scaler.
        hysteresis: the number of overflows since the last growth at which the scale starts to fall; 1 is torch's rule.
            InternEvo's ``DynamicGradScaler`` and DeepSpeed with ``consecutive_hysteresis=False`` work this way.
        floor, ceiling: bounds of the scale. A static scale equals both: ``LossScaler(init_scale=128.0, floor=128.0,
            ceiling=128.0)`` still skips steps that overflow.
        consecutive_hysteresis: count overflows since the last step without one instead, so that only ``hysteresis`` in
            a row, and each further one, lower the scale. DeepSpeed's key of this name.
        growth_delay: steps without an overflow, at the start and after each overflow, that do not count towards growth;
            DeepSpeed's scale (0.19.8, ``runtime/fp16/loss_scaler.py``) grows with 1.

    Raises:
        ConfigError: arguments out of range.

    Example::

        scaler = npuzero.LossScaler()
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)  # where gradients are clipped or looked at
        npuzero.clip_grad_norm_(model, 1.0)
        scaler.step(optimizer)
        scaler.update()
    """

    def __init__(  # noqa: PLR0913 - torch's signature, and five more
        self,
        device: str | torch.device | None = None,
        init_scale: float = 2.0**24,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 2000,
        enabled: bool = True,
        *,
        hysteresis: int = 1,
        floor: float = 1.0,
        ceiling: float = math.inf,
        consecutive_hysteresis: bool = False,
        growth_delay: int = 0,
    ) -> None:
        floor = _check_scaler_number("floor", floor, "a positive number", lambda n: 0 < n < math.inf)
        ceiling = _check_scaler_number("ceiling", ceiling, f"at least floor={floor}", lambda n: n >= floor)
        within = f"a number from floor={floor} to ceiling={ceiling}"
        init_scale = _check_scaler_number(
            "init_scale", init_scale, within, lambda n: floor <= n <= ceiling and n < math.inf
        )
        growth_factor = _check_scaler_number("growth_factor", growth_factor, "more than 1", lambda n: 1 < n < math.inf)
        backoff_factor = _check_scaler_number("backoff_factor", backoff_factor, "between 0 and 1", lambda n: 0 < n < 1)
        growth_interval = _check_scaler_count("growth_interval", growth_interval, 1)
        hysteresis, growth_delay = (
            _check_scaler_count("hysteresis", hysteresis, 1),
            _check_scaler_count("growth_delay", growth_delay, 0),
        )
        self._enabled = check_flag("LossScaler: enabled", enabled)
        settings = {
            "growth_factor": growth_factor,
            "backoff_factor": backoff_factor,
            "growth_interval": growth_interval,
            "hysteresis": hysteresis,
            "floor": floor,
            "ceiling": ceiling,
            "consecutive_hysteresis": check_flag("LossScaler: consecutive_hysteresis", consecutive_hysteresis),
            "growth_delay": growth_delay,
        }
        begins = {"scale": init_scale, "window": -growth_delay, "patience": hysteresis, "skipped": 0}
        self._kept = DeferredLossScale(settings, begins)
        # Since the last update(): the stage of each optimizer, and whether its gradients overflowed.
        self._stages: dict[int, _ScalerStage] = {}
        self._found: dict[int, Tensor] = {}

    # -- a training step -------------------------------------------------------------------------------------------

    def scale(self, outputs: Any) -> Any:
        """Multiply a tensor, or an iterable of tensors, by the scale."""
        if not self._enabled:
            return outputs
        if isinstance(outputs, Tensor):
            return outputs * self._kept.on(outputs.device).scale
        if isinstance(outputs, Iterable):
            scaled = map(self.scale, outputs)
            return type(outputs)(scaled) if isinstance(outputs, (list, tuple)) else scaled
        raise ConfigError(
            "LossScaler.scale", expected="a tensor or an iterable of tensors", got=repr(outputs), do="Pass the loss."
        )

    @_disable_dynamo
    def unscale_(self, optimizer: torch.optim.Optimizer) -> None:
        """Divide the optimizer's gradients by the scale. Collective over a sharded model; call it once per step.

        Raises:
            StateError: called out of order, or there is no gradient.
        """
        if not self._enabled:
            return
        self._expect_nothing_done(optimizer, "unscale_")
        engines, plain = _split_parameters(optimizer)
        staged = [engine for engine in engines if engine.mesh.shape.pipe > 1]
        # Only the last stage has a scaled loss; the scale is the same on all stages, and so is the result.
        state = self._kept.on(staged[0].device) if staged else self._begun("unscale_")
        inverse = state.inverse()
        rules = {**self._kept.settings, "init_scale": self._kept.begins["scale"]}
        mine = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
        found = [engine.gradients.unscale(inverse, rules, mine) for engine in engines]
        found += [_unscale_plain(gradient, inverse) for gradient in plain]
        present = [part.to(state.scale.device) for part in found if part is not None]
        if not present:
            raise StateError(
                "LossScaler.unscale_",
                expected="gradients",
                got="none on any rank",
                do="Call it after scaler.scale(loss).backward().",
            )
        self._found[id(optimizer)] = torch.stack([part.view(()) for part in present]).amax()
        self._stages[id(optimizer)] = _ScalerStage.UNSCALED

    @_disable_dynamo
    def step(self, optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> Any:
        """Call ``optimizer.step()`` on unscaled gradients; it has no effect if they overflowed. Collective if the step
        is.

        Raises:
            StateError: called out of order, or with a closure.
        """
        if not self._enabled:
            return optimizer.step(*args, **kwargs)
        if args or "closure" in kwargs:
            raise StateError(
                "LossScaler.step",
                expected="a step without closure: the gradients are there already",
                got="one",
                do="Run backward on the scaled loss first, then scaler.step(optimizer).",
            )
        # skip_where() must reach every engine before the optimizer's step, which reads it on the device.
        if self._stages.get(id(optimizer)) is not _ScalerStage.UNSCALED:
            self._expect_nothing_done(optimizer, "step")
            self.unscale_(optimizer)
        self._stages[id(optimizer)] = _ScalerStage.STEPPED
        overflow = self._found[id(optimizer)]
        engines, plain = _split_parameters(optimizer)
        mine = frozenset(id(parameter) for group in optimizer.param_groups for parameter in group["params"])
        for engine in engines:
            engine.boundary.skip_where(overflow.view(1).to(engine.device), mine)
        if not plain:
            return optimizer.step(**kwargs)
        if getattr(optimizer, "_step_supports_amp_scaling", False):
            return _step_unless_overflow(overflow, optimizer, kwargs)
        return None if overflow.item() else optimizer.step(**kwargs)

    @_disable_dynamo
    def update(self, new_scale: float | Tensor | None = None) -> None:
        """Update the scale by the overflows of the steps since the last call, or set it.

        Raises:
            StateError: there was no step since the last call.
        """
        if not self._enabled:
            return
        state = self._begun("update")
        if new_scale is not None:
            state.scale.copy_(torch.as_tensor(new_scale).view(()))
        elif not self._found:
            raise _wrong_order_error("update", "a step before it", "none since the last update")
        else:
            state.update(torch.stack(list(self._found.values())).amax())
        self._found.clear()
        self._stages.clear()

    # -- looking at it ---------------------------------------------------------------------------------------------

    def is_enabled(self) -> bool:
        return self._enabled

    def get_scale(self) -> float:
        """Return the current scale, 1 if disabled; synchronizes with the device."""
        return float(self._kept.now()["scale"]) if self._enabled else 1.0

    @property
    def skipped(self) -> int:
        """Return the number of skipped steps; synchronizes with the device."""
        return int(self._kept.now()["skipped"])

    def at_floor(self) -> Tensor | None:
        """Return () bool on the device: whether the scale is at its floor; None before the first loss."""
        state = self._kept.state
        return None if state is None else state.at_floor()

    def get_growth_factor(self) -> float:
        return float(self._kept.settings["growth_factor"])

    def set_growth_factor(self, new_factor: float) -> None:
        self._kept.set("growth_factor", new_factor)

    def get_backoff_factor(self) -> float:
        return float(self._kept.settings["backoff_factor"])

    def set_backoff_factor(self, new_factor: float) -> None:
        self._kept.set("backoff_factor", new_factor)

    def get_growth_interval(self) -> int:
        return int(self._kept.settings["growth_interval"])

    def set_growth_interval(self, new_interval: int) -> None:
        self._kept.set("growth_interval", new_interval)

    def state_dict(self) -> dict[str, Any]:
        """Return torch's state with npuzero's own keys added; ``{}`` if disabled. Synchronizes with the device."""
        if not self._enabled:
            return {}
        now = self._kept.now()
        return {
            "scale": now["scale"],
            **self._kept.settings,
            "_growth_tracker": now["window"],
            "_patience": now["patience"],
            "_skipped": now["skipped"],
        }

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load the result of :meth:`state_dict`, or of torch's scaler; do nothing if disabled.

        Raises:
            CheckpointError: it is no such state.
        """
        if not self._enabled:
            return
        needs = ("scale", "growth_factor", "backoff_factor", "growth_interval", "_growth_tracker")
        if not isinstance(state_dict, Mapping) or any(name not in state_dict for name in needs):
            raise CheckpointError(
                "loss scaler state",
                expected=f"a mapping with {', '.join(needs)}",
                got=str(sorted(state_dict)) if isinstance(state_dict, Mapping) else type(state_dict).__name__,
                do="Load what a scaler's state_dict() gave; a disabled one gives nothing.",
            )
        settings = self._kept.settings
        settings.update((name, state_dict[name]) for name in settings if name in state_dict)
        self._kept.begin_at(
            scale=float(state_dict["scale"]),
            window=state_dict["_growth_tracker"],
            patience=state_dict.get("_patience", settings["hysteresis"]),
            skipped=state_dict.get("_skipped", 0),
        )

    def _begun(self, call: str) -> LossScale:
        if self._kept.state is None:
            raise _wrong_order_error(call, "a loss scaled before", "none yet")
        return self._kept.state

    def _expect_nothing_done(self, optimizer: torch.optim.Optimizer, call: str) -> None:
        done = self._stages.get(id(optimizer))
        if done is not None:
            raise _wrong_order_error(call, "once per optimizer between updates", f"gradients that are {done.value}")

    def __getstate__(self) -> dict[str, Any]:
        """Return the state as ``torch.amp.GradScaler`` does: only between steps, and without tensors."""
        if self._stages:
            raise _wrong_order_error("pickle", "no step under way", "gradients that update() has not seen")
        return self.__dict__


def _wrong_order_error(call: str, expected: str, got: str) -> StateError:
    do = "Call scale(loss).backward(), unscale_(optimizer) if needed, step(optimizer), update(), in this order."
    return StateError(f"LossScaler.{call}", expected=expected, got=got, do=do)


def _split_parameters(optimizer: torch.optim.Optimizer) -> tuple[list[Engine], list[Tensor]]:
    """Return the engines of the optimizer's sharded parameters, and the gradients of its plain ones."""
    engines: dict[int, Engine] = {}
    plain = []
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            engine = engine_behind(parameter)
            if engine is not None:
                engines[id(engine)] = engine
            elif parameter.grad is not None:
                plain.append(parameter.grad)
    return list(engines.values()), plain


def _step_unless_overflow(overflow: Tensor, optimizer: Any, options: Mapping[str, Any]) -> Any:
    """Step an optimizer that reads the overflow on the device, by torch's protocol (``found_inf``)."""
    optimizer.found_inf = overflow
    try:
        return optimizer.step(**options)
    finally:
        del optimizer.found_inf


def _unscale_plain(gradient: Tensor, inverse: Tensor) -> Tensor:
    """Unscale a plain gradient in place; return () float32, nonzero if an element is inf or NaN."""
    gradient.mul_(inverse.to(gradient.device))
    return (~gradient.isfinite()).any().float()
