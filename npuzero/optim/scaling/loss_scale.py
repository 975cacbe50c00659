"""What loss scaling decides, on the device: no operation waits for it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor


class LossScale:
    """Scale the loss by what it finds: down where a step overflowed, up after a window without.

    The rule is torch's (``torch.amp.GradScaler``), with Megatron-LM's hysteresis between a floor and a ceiling: an
    overflow ends the window; from the ``hysteresis``-th on, counted since the scale last grew, each multiplies the
    scale by ``backoff_factor``, down to ``floor``; ``growth_interval`` steps without one multiply it by
    ``growth_factor``, up to ``ceiling``, if that is finite.

    With two more rules it is DeepSpeed's (0.19.8, ``runtime/fp16/loss_scaler.py``, ``DynamicLossScaler``): a window
    begins with ``growth_delay`` steps that it does not count, one of them there; and with ``consecutive_hysteresis`` a
    step without an overflow, not growth, is what overflows are counted from.

    Args:
        device: of its tensors.
        rules: by name what :class:`npuzero.LossScaler` was told; a change counts from the next step on.
        scale, window, patience, skipped: to begin with.

    Attributes:
        scale: () float32 on the device.
        window: () int64, steps since the last overflow or growth, without those of the delay.
        patience: () int64, overflows left before the scale goes down.
        skipped: () int64, overflows in all.
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
        """Return () float32: what a scaled gradient is multiplied by."""
        return self.scale.double().reciprocal().float()

    def at_floor(self) -> Tensor:
        """Return () bool: it cannot go down any further."""
        return self.scale.le(self._rules["floor"])

    @torch.no_grad()
    def update(self, found: Tensor) -> None:
        """Take in one step; ``found``: () float32, not zero where it overflowed."""
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
    """Keep a loss scale from before the first loss, whose device nobody knows, through pickles without tensors.

    Attributes:
        settings: the rules of :class:`LossScale`.
        begins: the values of its tensors when it is made.
        state: the scale, once there is a device for it.
    """

    def __init__(self, settings: dict[str, Any], begins: dict[str, Any]) -> None:
        self.settings = settings
        self.begins = begins
        self.state: LossScale | None = None

    def on(self, device: torch.device) -> LossScale:
        """Return the scale, made on the device if there is none yet."""
        if self.state is None:
            self.state = self._made(device)
        return self.state

    def now(self) -> dict[str, Any]:
        """Return numbers by name; waits for the device."""
        if self.state is None:
            return self.begins
        return {name: getattr(self.state, name).item() for name in self.begins}

    def set(self, name: str, value: float) -> None:
        """Change one of the settings, from the next step on."""
        self.settings[name] = value

    def begin_at(self, **values: Any) -> None:
        """Go on from these, with the settings as they are."""
        self.begins = values
        if self.state is not None:
            self.state = self._made(self.state.scale.device)

    def _made(self, device: torch.device) -> LossScale:
        return LossScale(device, self.settings, **self.begins)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "begins": self.now(), "state": None}
