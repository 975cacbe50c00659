"""Which optimizer or schedule a type of DeepSpeed's is, and what it takes."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from npuzero.errors import did_you_mean
from npuzero.optim import Adam, AdamW, Lion, ZeroOptimizer


@dataclass(frozen=True)
class Maker:
    """Make an optimizer or a schedule.

    Args:
        make: from parameters, or from an optimizer, and options.
        options: what it takes.
        defaults: of what is not said.
        required: what has to be said.
    """

    make: Any
    options: tuple[str, ...]
    defaults: Mapping[str, Any] = field(default_factory=dict)
    required: tuple[str, ...] = ()

    def __call__(self, over: Any, options: Mapping[str, Any]) -> Any:
        """Return what it makes over parameters, or over an optimizer."""
        return self.make(over, **{**self.defaults, **options})


_ADAM = ("lr", "betas", "eps", "weight_decay", "bias_correction", "amsgrad")
#: DeepSpeed's fused kernels' own defaults, where they are others than those of npuzero's class.
_DEFAULTS = {"weight_decay": 0.0}
#: Types that are DeepSpeed's own, in small letters; the others are torch's classes, in theirs.
OPTIMIZERS = {
    "adamw": Maker(AdamW, _ADAM, _DEFAULTS),
    "adam": Maker(AdamW, _ADAM, _DEFAULTS),
    "lion": Maker(Lion, ("lr", "betas", "weight_decay"), {"lr": 1e-3, "betas": (0.9, 0.999), **_DEFAULTS}),
}
#: What type adam is where weight decay is no decoupled one.
PLAIN_ADAM = Maker(Adam, _ADAM, _DEFAULTS)
_WHOLE = "its update of an element depends on others, which lie on other ranks"
#: Types that DeepSpeed has, or had, and npuzero has not.
MISSING_OPTIMIZERS = {
    "lamb": _WHOLE,
    "muon": _WHOLE,
    "muadam": "it is mup's: build it, and pass it as optimizer=",
    "muadamw": "it is mup's: build it, and pass it as optimizer=",
    "musgd": "it is mup's: build it, and pass it as optimizer=",
    "onebitadam": "DeepSpeed has removed it; AdamW with thin wires sends few bits (zero_quantized_gradients)",
    "zerooneadam": "DeepSpeed has removed it; AdamW with thin wires sends few bits (zero_quantized_gradients)",
    "onebitlamb": "DeepSpeed has removed it",
}


def optimizer_of(kind: str, decoupled: bool, from_torch: bool) -> Maker | str:
    """Return what makes the optimizer of a type; or why there is none, and what to do.

    Args:
        kind: ``optimizer.type``.
        decoupled: ``adam_w_mode``.
        from_torch: ``torch_adam``, whose defaults are torch's.
    """
    name = kind.lower()
    if name in MISSING_OPTIMIZERS:
        return f"There is no {kind}: {MISSING_OPTIMIZERS[name]}. Take AdamW, Lion or a class of torch's."
    if name in OPTIMIZERS:
        own = OPTIMIZERS[name]
        if own.make is AdamW and name == "adam" and not decoupled:
            own = PLAIN_ADAM
        return Maker(own.make, own.options) if from_torch and own.make in (Adam, AdamW) else own
    name = {"adagrad": "Adagrad"}.get(name, kind)
    cls = getattr(torch.optim, name, None)
    if not (isinstance(cls, type) and issubclass(cls, torch.optim.Optimizer)) or cls is torch.optim.Optimizer:
        known = [*OPTIMIZERS, *_classes(torch.optim, torch.optim.Optimizer)]
        return did_you_mean(kind, known, "Take AdamW, Adam, Lion or a class of torch.optim.")
    return Maker(partial(ZeroOptimizer, cls), _arguments(cls))


def schedule_of(kind: str) -> Maker | str:
    """Return what makes the schedule of a type, DeepSpeed's or torch's; or what to do where there is none."""
    if not kind:
        return "Name a type."
    from npuzero.optim import schedules

    own = {name: getattr(schedules, name) for name in SCHEDULES}
    cls = own.get(kind) or getattr(torch.optim.lr_scheduler, kind, None)
    if not isinstance(cls, type):
        known = [*own, *_classes(torch.optim.lr_scheduler, torch.optim.lr_scheduler.LRScheduler)]
        return did_you_mean(kind, known, f"Take {', '.join(own)} or a class of torch.optim.lr_scheduler.")
    signature = [*inspect.signature(cls).parameters.values()][1:]
    required = tuple(parameter.name for parameter in signature if parameter.default is inspect.Parameter.empty)
    return Maker(cls, _arguments(cls), {}, required)


#: DeepSpeed's own schedules.
SCHEDULES = ("LRRangeTest", "OneCycle", "WarmupLR", "WarmupDecayLR", "WarmupCosineLR")


def _arguments(cls: type) -> tuple[str, ...]:
    return tuple(inspect.signature(cls).parameters)[1:]


def _classes(module: Any, kind: type) -> Iterable[str]:
    return (name for name, value in vars(module).items() if isinstance(value, type) and issubclass(value, kind))
