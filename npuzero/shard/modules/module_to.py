"""Check ``model.to()`` and similar calls on a sharded model: raise a StateError if they change something.

All of these calls end in ``Module._apply(fn)``, which calls ``fn`` with every parameter, gradient and buffer. Only the
engine can move or convert parameters that are views of flats. But most such calls change nothing, because trainers move
each model to the device where it already is.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from npuzero.errors import StateError
from npuzero.shard.modules.attribute_overlay import overlay_attributes
from npuzero.shard.modules.sharded_tensor import GradientMarker, is_engine_parameter

_Function = Callable[[Tensor], Tensor]


def watch_conversions(model: nn.Module) -> None:
    """Replace ``_apply`` of every module of ``model`` that has parameters by a checked version."""
    for module in model.modules():
        if any(True for _ in module.parameters()):
            overlay_attributes(module, _apply=_make_checked_apply(weakref.ref(module)))


def _make_checked_apply(module_of: weakref.ref[nn.Module]) -> Callable[..., nn.Module]:
    def apply(fn: _Function, recurse: bool = True) -> nn.Module:
        """Call ``_apply``; raise a StateError before it touches anything if ``fn`` changes a parameter of an engine."""
        module = module_of()
        assert module is not None
        if not isinstance(fn, _OutsideEngine):
            for name, parameter in module.named_parameters(recurse=recurse):
                if is_engine_parameter(parameter):
                    _check_conversion(f"{type(module).__name__}.{_conversion_name(fn)}", name, parameter, fn)
            fn = _OutsideEngine(fn)
        plain: Callable[..., nn.Module] = type(module)._apply
        return plain(module, fn, recurse)

    return apply


class _OutsideEngine:
    """Apply ``fn`` to all tensors except an engine's, which it would not change."""

    def __init__(self, fn: _Function) -> None:
        self._fn = fn

    def __call__(self, tensor: Tensor) -> Tensor:
        return tensor if is_engine_parameter(tensor) or isinstance(tensor, GradientMarker) else self._fn(tensor)


@torch.no_grad()
def _check_conversion(call: str, name: str, parameter: nn.Parameter, fn: _Function) -> None:
    """Try ``fn`` on a small tensor with the same device, dtype and number of dimensions."""
    sizes = [min(size, 2) for size in parameter.shape]
    value = next(_values) % 251  # a new value each time: memory returned unwritten may still have the last one
    probe = nn.Parameter(torch.full(sizes, value, dtype=parameter.dtype, device=parameter.device))
    memory, version = probe.data_ptr(), probe._version
    try:
        found: Any = fn(probe)
        difference = _conversion_change(probe, found)
    except (RuntimeError, AssertionError, TypeError, ValueError) as error:  # torch lacks the device or dtype
        raise _refused_conversion_error(call, name, probe, f"a conversion that fails: {error}") from error
    if not difference and (probe.data_ptr() != memory or probe._version != version or not (found == value).all()):
        difference = "a function for Module._apply that writes"
    if difference:
        raise _refused_conversion_error(call, name, probe, difference)


def _conversion_name(fn: _Function) -> str:
    """Return the method that passed ``fn`` to Module._apply: ``half()``, ``to()``."""
    kind, _, method = getattr(fn, "__qualname__", "").partition(".<locals>")[0].rpartition(".")
    return f"{method}()" if kind == nn.Module.__name__ else "_apply()"


def _refused_conversion_error(call: str, name: str, probe: Tensor, got: str) -> StateError:
    return StateError(
        f"{call} after npuzero.zero()",
        expected=f"parameter {name} to stay {_dtype_and_device(probe)}, contiguous and where it lies: in a flat buffer",
        got=got,
        do="Move and convert the model before npuzero.zero(), or say npuzero.zero(model, precision=...); take full "
        "tensors out with npuzero.full_state_dict. (channels_last needs no conversion: a convolution follows its "
        "input.)",
    )


_values = itertools.count()


def _dtype_and_device(tensor: Tensor) -> str:
    index = f":{tensor.device.index}" if tensor.device.index else ""
    return f"{tensor.dtype} on {tensor.device.type}{index}"  # without index 0: some callers write "cpu:0" for "cpu"


def _conversion_change(probe: Tensor, found: Any) -> str:
    if not isinstance(found, Tensor):
        return f"a function for Module._apply that returns {type(found).__name__}"
    if _dtype_and_device(found) != _dtype_and_device(probe):
        return f"a conversion to {_dtype_and_device(found)}"
    return "" if found.stride() == probe.stride() else "a conversion to another memory format"
