"""Choose the class and the options of an optimizer or schedule by DeepSpeed's type name."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from npuzero.errors import ConfigError, did_you_mean
from npuzero.optim import Adam, AdamW, Lion, ZeroOptimizer
from npuzero.schedules import LRRangeTest, OneCycle, WarmupCosineLR, WarmupDecayLR, WarmupLR


@dataclass(frozen=True)
class ObjectMaker:
    """Make an optimizer or a schedule.

    Args:
        make: called with parameters or an optimizer, and the options.
        options: names of the options that ``make`` takes.
        defaults: values of options that are not given.
        required: names of the options that must be given.
    """

    make: Any
    options: tuple[str, ...]
    defaults: Mapping[str, Any] = field(default_factory=dict)
    required: tuple[str, ...] = ()

    def __call__(self, over: Any, options: Mapping[str, Any]) -> Any:
        """Return the optimizer over parameters, or the schedule over an optimizer.

        Raises:
            ConfigError: ``make`` refuses an option.
        """
        try:
            return self.make(over, **{**self.defaults, **options})
        except (TypeError, ValueError) as error:
            if isinstance(error, ConfigError):
                raise
            name = getattr(self.make, "__name__", "the optimizer")
            raise ConfigError(name, expected="options that it takes", got=str(error), do="Correct them.") from error


_ADAM = ("lr", "betas", "eps", "weight_decay", "bias_correction", "amsgrad")
#: Defaults of DeepSpeed's fused kernels where npuzero's class has different ones.
_DEFAULTS = {"weight_decay": 0.0}
#: DeepSpeed's own types, in lower case; all others are torch's classes, in their own spelling.
OPTIMIZERS = {
    "adamw": ObjectMaker(AdamW, _ADAM, _DEFAULTS),
    "adam": ObjectMaker(AdamW, _ADAM, _DEFAULTS),
    "lion": ObjectMaker(Lion, ("lr", "betas", "weight_decay"), {"lr": 1e-3, "betas": (0.9, 0.999), **_DEFAULTS}),
}
#: The type adam where weight decay is not decoupled.
PLAIN_ADAM = ObjectMaker(Adam, _ADAM, _DEFAULTS)
_WHOLE = "its update of an element depends on others, which lie on other ranks"
#: Types that DeepSpeed has or had, and npuzero lacks.
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


#: DeepSpeed's own schedules, in its spelling; all others are torch's.
SCHEDULES: dict[str, type] = {
    schedule.__name__: schedule for schedule in (LRRangeTest, OneCycle, WarmupLR, WarmupDecayLR, WarmupCosineLR)
}


def choose_optimizer_maker(kind: str, decoupled: bool, from_torch: bool) -> ObjectMaker | str:
    """Return the maker of an optimizer type; where there is none, a text with the reason and an alternative.

    Args:
        kind: ``optimizer.type``.
        decoupled: ``adam_w_mode``.
        from_torch: ``torch_adam``, which takes torch's defaults.
    """
    # DeepSpeed reads its own types in any case, and torch's classes by their exact name, but for "adagrad".
    name = kind.lower()
    if name in MISSING_OPTIMIZERS:
        return f"There is no {kind}: {MISSING_OPTIMIZERS[name]}. Take AdamW, Lion or a class of torch's."
    if name in OPTIMIZERS:
        own = OPTIMIZERS[name]
        if own.make is AdamW and name == "adam" and not decoupled:
            own = PLAIN_ADAM
        return ObjectMaker(own.make, own.options) if from_torch and own.make in (Adam, AdamW) else own
    name = {"adagrad": "Adagrad"}.get(name, kind)
    cls = getattr(torch.optim, name, None)
    if not (isinstance(cls, type) and issubclass(cls, torch.optim.Optimizer)) or cls is torch.optim.Optimizer:
        known = [*OPTIMIZERS, *_subclass_names(torch.optim, torch.optim.Optimizer)]
        return did_you_mean(kind, known, "Take AdamW, Adam, Lion or a class of torch.optim.")
    return ObjectMaker(partial(ZeroOptimizer, cls), _constructor_arguments(cls))


def choose_schedule_maker(kind: str) -> ObjectMaker | str:
    """Return the maker of a schedule type, DeepSpeed's or torch's; where there is none, a text with an alternative."""
    if kind == "ReduceLROnPlateau":
        return "It needs a measurement at each step: make it in the program, and step it there."
    cls = SCHEDULES.get(kind) or getattr(torch.optim.lr_scheduler, kind, None)
    base = torch.optim.lr_scheduler.LRScheduler
    if not (isinstance(cls, type) and issubclass(cls, base)) or cls is base:
        known = [*SCHEDULES, *_subclass_names(torch.optim.lr_scheduler, base)]
        return did_you_mean(kind, known, f"Take {', '.join(SCHEDULES)} or a class of torch.optim.lr_scheduler.")
    signature = [*inspect.signature(cls).parameters.values()][1:]
    required = tuple(parameter.name for parameter in signature if parameter.default is inspect.Parameter.empty)
    return ObjectMaker(cls, _constructor_arguments(cls), {}, required)


def _constructor_arguments(cls: type) -> tuple[str, ...]:
    return tuple(inspect.signature(cls).parameters)[1:]


def _subclass_names(module: Any, kind: type) -> Iterable[str]:
    return (name for name, value in vars(module).items() if isinstance(value, type) and issubclass(value, kind))
