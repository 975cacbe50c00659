"""InternEvo's optimizer interface over a sharded model: step() unscales, clips, and returns whether it updated."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from npuzero.api import LossScaler, clip_grad_norm_, no_sync
from npuzero.errors import CheckpointError, ConfigError, StateError, refuse_unknown_keywords

#: The norms that stand for gradients with an inf and with a NaN, as in InternEvo.
INF_NORM, NAN_NORM = -1.0, -2.0


@refuse_unknown_keywords(grad_scal_cfg="scaler", zero_cfg="clip_grad_norm", optim="optimizer")
class HybridZeroOptimizer(torch.optim.Optimizer):
    """Train a sharded model by the calls of InternEvo's ``HybridZeroOptimizer``.

    Gradients, masters and moments are where the plan of ``npuzero.zero`` has them; this class scales the loss, unscales
    and clips gradients, skips a step that is not finite, and reports it. Other attributes, such as ``param_groups`` and
    ``state``, are read from ``optim``. A torch scheduler accepts either object.

    Args:
        model: made by :func:`npuzero.zero` or :func:`npuzero.pipeline`.
        optimizer: an npuzero optimizer over its parameters.
        scaler: None means a constant scale of 1; steps that are not finite are still skipped.
        clip_grad_norm: the maximum norm of gradients; 0 means no clipping, and no norm is returned.

    Attributes:
        optim: the optimizer, to be passed to checkpoints.
        grad_scaler: the scaler, to be passed to a pipeline's step.
        skip_grad_reduce: whether backward accumulates locally, as under :func:`npuzero.no_sync`. Set it for all
            micro-batches of a step but the last.

    Raises:
        ConfigError: ``clip_grad_norm`` is negative or no finite number.

    Example::

        from npuzero.compat.internevo import HybridZeroOptimizer

        adamw = npuzero.AdamW(model.parameters(), lr=1e-3)
        optimizer = HybridZeroOptimizer(model, adamw, npuzero.LossScaler(init_scale=2.0**16), clip_grad_norm=1.0)
        optimizer.zero_grad()
        optimizer.backward(model(x).square().mean())
        done, norms = optimizer.step()
        print(done, norms)
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        scaler: LossScaler | None = None,
        clip_grad_norm: float = 0.0,
    ) -> None:
        # Not torch's constructor: groups and state are the inner optimizer's.
        if not isinstance(clip_grad_norm, (int, float)) or not 0 <= clip_grad_norm < math.inf:
            do = "Give the largest norm of gradients, or 0 to clip nothing."
            name = "HybridZeroOptimizer: clip_grad_norm"
            raise ConfigError(name, expected="a number from 0", got=repr(clip_grad_norm), do=do)
        self.optim = optimizer
        self.grad_scaler = LossScaler(init_scale=1.0, floor=1.0, ceiling=1.0) if scaler is None else scaler
        self.skip_grad_reduce = False
        self._model = model
        self._max_norm = float(clip_grad_norm)
        self._skipped = self.grad_scaler.skipped

    def __getattr__(self, name: str) -> Any:
        if name == "optim":  # the constructor has not run yet, as during a copy
            raise AttributeError(name)
        return getattr(self.optim, name)

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)

    def __repr__(self) -> str:
        return f"HybridZeroOptimizer({self.optim!r}, clip_grad_norm={self._max_norm:g})"

    @property
    def loss_scale(self) -> Tensor:
        """Return the loss scale, (1,) float32; waits for the device."""
        return torch.tensor([self.grad_scaler.get_scale()])

    def backward(self, loss: Tensor, retain_graph: bool = False) -> None:
        """Run backward of the scaled ``loss``. It is not divided by the number of micro-batches: your loop does that.

        Args:
            loss: a scalar on the device.
            retain_graph: as for torch.
        """
        with no_sync(self._model) if self.skip_grad_reduce else contextlib.nullcontext():
            self.grad_scaler.scale(loss).backward(retain_graph=retain_graph)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the gradients."""
        self.optim.zero_grad(set_to_none)

    def step(self, closure: Callable[[], Any] | None = None) -> tuple[bool, dict[str, float]]:  # type: ignore[override]
        """Unscale and clip gradients, update parameters and scale, and drop the gradients. Collective; synchronizes
        with the device.

        Returns:
            Whether parameters were updated, the same on every rank; False if a gradient of any rank is inf or NaN. And
            the norm of the gradients before clipping, as ``{"0_default": norm}``, -1 for an inf, -2 for a NaN; ``{}``
            without clipping.

        Raises:
            StateError: a closure is given, or there is no gradient.
        """
        if closure is not None:
            do = "Call backward() before."
            raise StateError("HybridZeroOptimizer.step", expected="no closure", got="one", do=do)
        self.grad_scaler.unscale_(self.optim)
        norms = {}
        if self._max_norm:
            name = self.optim.param_groups[0].get("name", "default")
            mine = [parameter for group in self.optim.param_groups for parameter in group["params"]]
            norms[f"0_{name}"] = _convert_norm(clip_grad_norm_(mine, self._max_norm).item())
        self.grad_scaler.step(self.optim)
        self.grad_scaler.update()
        before, self._skipped = self._skipped, self.grad_scaler.skipped
        self.zero_grad()
        return self._skipped == before, norms

    def clip_grad_norm(self, model: nn.Module, max_norm: float) -> None:
        """Do nothing, as InternEvo's: :meth:`step` clips."""

    def state_dict(self) -> dict[str, Any]:
        """Return the states of scaler and optimizer, under InternEvo's names. Collective."""
        return {"grad_scaler": self.grad_scaler.state_dict(), "base_optim_states": self.optim.state_dict()}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load the result of :meth:`state_dict`.

        Raises:
            CheckpointError: it is no such state, or InternEvo wrote it, in its own shard format.
        """
        names = ("grad_scaler", "base_optim_states")
        if not isinstance(state_dict, Mapping) or set(names) - set(state_dict) or "flat_fp32_weights" in state_dict:
            raise CheckpointError(
                "HybridZeroOptimizer state",
                expected=f"a mapping with {' and '.join(names)}, from state_dict() here",
                got=str(sorted(state_dict)) if isinstance(state_dict, Mapping) else type(state_dict).__name__,
                do="Load what state_dict() returned; InternEvo's own shards are not read: begin from weights.",
            )
        self.grad_scaler.load_state_dict(state_dict["grad_scaler"])
        self.optim.load_state_dict(state_dict["base_optim_states"])
        self._skipped = self.grad_scaler.skipped


def _convert_norm(norm: float) -> float:
    """Return a norm in InternEvo's encoding."""
    return NAN_NORM if math.isnan(norm) else INF_NORM if math.isinf(norm) else norm
