"""The loss scale and its rule, on the device: no operation makes the host wait."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor


class LossScale:
    """Update the loss scale by the overflows found: lower it at an overflow, raise it after a window without any.

    The rule is torch's (``torch.amp.GradScaler``) with Megatron-LM's hysteresis, between a floor and a ceiling. An
    overflow ends the window. Overflows are counted since the scale last grew; from the ``hysteresis``-th on, each
    multiplies the scale by ``backoff_factor``, down to ``floor``. ``growth_interval`` steps without an overflow
    multiply it by ``growth_factor``, up to ``ceiling``, if the result is finite.

    With two more options it is DeepSpeed's rule (0.19.8, ``runtime/fp16/loss_scaler.py``, ``DynamicLossScaler``): the
    first ``growth_delay`` steps of a window do not count (DeepSpeed: one), and with ``consecutive_hysteresis``
    overflows are counted since the last step without one, instead of since the last growth.

    Args:
        device: of the tensors.
        rules: the arguments of :class:`npuzero.LossScaler` by name; a change applies from the next step on.
        scale, window, patience, skipped: initial values.

    Attributes:
        scale: () float32 on the device.
        window: () int64, steps since the last overflow or growth, without the delay.
        patience: () int64, overflows left before the scale falls.
        skipped: () int64, total number of overflows.
    """

    def __init__(
        self, device: torch.device, rules: Mapping[str, Any], scale: float, window: int, patience: int, skipped: int
    ) -> None:
        self.scale = torch.full((), scale, dtype=torch.float32, device=device)
        self.window, self.patience, self.skipped = (
            torch.full((), value, dtype=torch.int64, device=device) for value in (window, patience, skipped)
        )
        self._rules = rules

    def inverse(self) -> Tensor:
        """Return () float32, the factor that unscales gradients."""
        return self.scale.double().reciprocal().float()

    def at_floor(self) -> Tensor:
        """Return () bool: whether the scale is at its floor."""
        return self.scale.le(self._rules["floor"])

    @torch.no_grad()
    def update(self, found: Tensor) -> None:
        """Count one step; ``found``: () float32, nonzero if it overflowed."""
        rules = self._rules
        overflow = found != 0
        wide = self.scale.double()
        window = torch.where(overflow, -rules["growth_delay"], self.window + 1)
        patience = torch.where(overflow, (self.patience - 1).clamp(min=0), self.patience)
        grown = (wide * rules["growth_factor"]).float().clamp(max=rules["ceiling"])
        grows = window >= rules["growth_interval"]
        shrunk = (wide * rules["backoff_factor"]).float().clamp(min=rules["floor"])
        self.scale.copy_(
            torch.where(overflow & (patience == 0), shrunk, torch.where(grows & grown.isfinite(), grown, self.scale))
        )
        self.window.copy_(torch.where(grows, 0, window))
        refilled = ~overflow if rules["consecutive_hysteresis"] else grows
        self.patience.copy_(torch.where(refilled, rules["hysteresis"], patience))
        self.skipped.add_(overflow)


class DeferredLossScale:
    """Keep a loss scale before the first loss, while its device is unknown, and through pickles without tensors.

    Attributes:
        settings: the rules of :class:`LossScale`.
        begins: the initial values of its tensors.
        state: the scale, once its device is known.
    """

    def __init__(self, settings: dict[str, Any], begins: dict[str, Any]) -> None:
        self.settings = settings
        self.begins = begins
        self.state: LossScale | None = None

    def on(self, device: torch.device) -> LossScale:
        """Return the scale, created on the device if there is none yet."""
        if self.state is None:
            self.state = self._made(device)
        return self.state

    def now(self) -> dict[str, Any]:
        """Return the values by name; synchronizes with the device."""
        if self.state is None:
            return self.begins
        return {name: getattr(self.state, name).item() for name in self.begins}

    def set(self, name: str, value: float) -> None:
        """Change a setting from the next step on."""
        self.settings[name] = value

    def begin_at(self, **values: Any) -> None:
        """Resume from these values, with the current settings."""
        self.begins = values
        if self.state is not None:
            self.state = self._made(self.state.scale.device)

    def _made(self, device: torch.device) -> LossScale:
        return LossScale(device, self.settings, **self.begins)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "begins": self.now(), "state": None}
