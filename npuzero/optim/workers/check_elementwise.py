"""Test whether a torch optimizer is element-wise: update some elements together, and the same ones separately.

A rank updates its part of a parameter without the rest. That is correct only if the update of an element depends on
nothing but its value, gradient and state. A class does not declare this, so a few small tensors are updated by one
optimizer in full, and range by range by separate optimizers. Values and gradients differ in magnitude from range to
range, so any norm of a tensor, of a row or of all gradients differs as well.
"""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch
from torch import Tensor

from npuzero.errors import ConfigError
from npuzero.optim.rules.rule import Options

#: Makes an optimizer of the tested class over some tensors.
Make = Callable[[Sequence[Tensor]], torch.optim.Optimizer]

_STEPS = 7  # RAdam's second formula begins at step 6; DAdaptation's estimates change from step 2 on
_SHAPES = ((4, 6), (1, 5))  # matrices: some optimizers treat them differently, or accept nothing else
_RANGES = ((0, 1), (1, 9), (9, 24), (24, 29))  # of all elements; the matrix is also cut within a row
# Rounding differs in a few bits with the length of a tensor; a norm that differs is a factor.
_TOLERANCE, _ROUNDING = 1e-3, 1e-6
#: By class and kind of options: the names of its states that are one number per parameter.
_PASSED: weakref.WeakKeyDictionary[type, dict[str, frozenset[str]]] = weakref.WeakKeyDictionary()


def check_elementwise(
    optimizer_class: type[torch.optim.Optimizer], options: Options, device: torch.device
) -> frozenset[str]:
    """Check an optimizer class with the options of a group, once for each kind of options.

    The random number generators are restored, and no hooks are called.

    Args:
        options: keyword arguments of the class.
        device: of the parameters.

    Returns:
        The names of its states that are one number per parameter, such as ``step``.

    Raises:
        ConfigError: it is not element-wise, needs a closure, or cannot step on dense gradients; gives the difference
            found.
        Exception: the class refuses an option.
    """
    passed = _PASSED.setdefault(optimizer_class, {})
    # Only zero or nonzero matters for a number: a nonzero one turns on a term of the update.
    kind = repr(sorted((k, bool(v) if isinstance(v, (int, float)) else repr(v)) for k, v in options.items()))
    if kind in passed:
        return passed[kind]
    trial = {**options}
    if isinstance(trial.get("lr"), (int, float, Tensor)):
        trial["lr"] = 0.1  # with lr=0 no update is visible
    place = torch.device("cpu") if device.type == "meta" else device
    if place.type == "cpu" and "capturable" in trial:
        trial["capturable"] = False  # affects complete optimizers, and only on accelerators

    def make(parameters: Sequence[Tensor]) -> torch.optim.Optimizer:
        return optimizer_class(parameters, **trial)

    accelerators = [] if place.type == "cpu" else [place]
    with torch.random.fork_rng(accelerators, device_type=place.type if accelerators else "cuda"), torch.no_grad():
        problem, numbers = _find_difference(make, place)
    if problem is not None:
        raise ConfigError(
            f"ZeroOptimizer of {optimizer_class.__name__}",
            expected="an element-wise optimizer (a shard is updated without the rest)",
            got=problem,
            do="Choose SGD, Adam, AdamW, RMSprop, Adagrad or the like; what looks at whole tensors or norms, or at the "
            "loss, cannot be had of shards.",
        )
    passed[kind] = numbers
    return numbers


def state_names(
    optimizer_class: type[torch.optim.Optimizer], options: Options, given: Collection[str]
) -> tuple[set[str], bool] | None:
    """Return the names of the states that a step creates, and whether the class can continue with only those ``given``.

    Args:
        options: keyword arguments of the class.

    Returns:
        None if the class refuses ``options``, or to step.
    """
    trial = {**options, "capturable": False} if "capturable" in options else options
    tensors = _probe_values(torch.device("cpu"))
    with torch.random.fork_rng([]), torch.no_grad():
        try:
            optimizer = optimizer_class(tensors, **trial)
            for tensor, gradient in zip(tensors, _probe_gradients(0, torch.device("cpu")), strict=True):
                tensor.grad = gradient
            _step_unhooked(optimizer)
        except Exception:
            return None
        kept = {name for state in optimizer.state.values() for name, value in state.items() if value is not None}
        for state in optimizer.state.values():
            for name in kept - {*given}:
                state.pop(name, None)
        try:
            _step_unhooked(optimizer)
        except Exception:
            return kept, False
    return kept, True


def _find_difference(make: Make, device: torch.device) -> tuple[str | None, frozenset[str]]:
    """Return the difference from an element-wise optimizer, or None; and the names of its scalar states."""
    wholes = _probe_values(device)
    together = make(wholes)
    if problem := _why_unusable(together):
        return problem, frozenset()
    begin = _concatenate_flat(wholes)
    # One optimizer per range instead of groups: in one optimizer a norm of its gradients would be equal for both.
    pieces = [begin[first:last].clone() for first, last in _RANGES]
    try:
        apart = [make([piece]) for piece in pieces]
    except (ValueError, TypeError, RuntimeError) as error:
        return f"one that refuses a range of a tensor: {error}", frozenset()
    for step in range(_STEPS):
        gradients = _probe_gradients(step, device)
        for whole, gradient in zip(wholes, gradients, strict=True):
            whole.grad = gradient
        flat = _concatenate_flat(gradients)  # before a step, which may write into its gradients
        for piece, (first, last) in zip(pieces, _RANGES, strict=True):
            piece.grad = flat[first:last].clone()
        for optimizer in (together, *apart):
            try:
                _step_unhooked(optimizer)
            except Exception as error:
                return f"one whose step on dense gradients raises {type(error).__name__}: {error}", frozenset()
    return _compare_results(begin, _concatenate_flat(wholes), torch.cat(pieces)), _scalar_state_names(together)


def _scalar_state_names(optimizer: torch.optim.Optimizer) -> frozenset[str]:
    states = optimizer.state.values()
    return frozenset(k for state in states for k, v in state.items() if isinstance(v, Tensor) and not v.dim())


def _why_unusable(optimizer: torch.optim.Optimizer) -> str | None:
    needed = [
        name
        for name, parameter in list(inspect.signature(type(optimizer).step).parameters.items())[1:]
        if parameter.default is parameter.empty and parameter.kind is not parameter.VAR_KEYWORD
    ]
    return f"one whose step needs a {needed[0]}, in which it may look at the loss again" if needed else None


def _step_unhooked(optimizer: torch.optim.Optimizer) -> None:
    """Take a step without the global hooks that a program may have registered for all optimizers."""
    step: Any = type(optimizer).step
    (step.__wrapped__ if getattr(step, "hooked", False) else step)(optimizer)


def _compare_results(begin: Tensor, together: Tensor, apart: Tensor) -> str | None:
    moved, error = (together - begin).abs(), (together - apart).abs()
    wrong = ~(error <= _TOLERANCE * moved + _ROUNDING * begin.abs()) & ~(together.isnan() & apart.isnan())
    if not wrong.any():
        return None
    i = int((error / (moved + begin.abs())).nan_to_num(0.0).mul(wrong).argmax())
    ways = [f"by {float(end[i] - begin[i]):.4g}" for end in (together, apart)]
    return f"one that moves an element {ways[0]} as part of its tensor, and {ways[1]} in a part of it"


def _probe_values(device: torch.device) -> list[Tensor]:
    """Make values from 0.01 to 2 that grow from range to range."""
    numbers = torch.arange(1, 30, dtype=torch.float32)
    values = torch.sin(numbers * 1.7) * torch.logspace(-2, 0.3, 29)
    return _split_into_shapes(values.to(device))


def _probe_gradients(step: int, device: torch.device) -> list[Tensor]:
    """Make gradients from 0.001 to 10 that shrink from range to range, of both signs and never near zero."""
    numbers = torch.arange(1, 30, dtype=torch.float32)
    signs = torch.where(torch.sin(numbers * 2.3 + step) > 0, 1.0, -1.0)
    sizes = torch.logspace(1, -3, 29) * (1.5 + torch.cos(numbers + 3.0 * step))
    return _split_into_shapes((signs * sizes).to(device))


def _split_into_shapes(flat: Tensor) -> list[Tensor]:
    parts = flat.split([torch.Size(shape).numel() for shape in _SHAPES])
    return [part.clone().view(shape) for part, shape in zip(parts, _SHAPES, strict=True)]


def _concatenate_flat(tensors: Sequence[Tensor]) -> Tensor:
    return torch.cat([tensor.reshape(-1) for tensor in tensors])
