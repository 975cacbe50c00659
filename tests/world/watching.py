"""Check on a CPU that a graph can capture a step: the host reads no value, and every step issues the same calls."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from npuzero import _C, _native

_ATEN = torch.ops.aten
#: On an accelerator they wait for it, or send a value the host has just then: neither can be captured.
_BREAK_CAPTURE = (
    _ATEN._local_scalar_dense.default,
    _ATEN.is_nonzero.default,
    _ATEN.nonzero.default,
    _ATEN.lift_fresh.default,  # torch.tensor(...)
    _ATEN.masked_select.default,
)
_LAUNCHES = ("flat_adam", "pack", "norm", "cast")


class _OperationRecorder(TorchDispatchMode):
    def __init__(self, seen: list[Any]) -> None:
        super().__init__()
        self._seen = seen

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert func not in _BREAK_CAPTURE, f"{func} breaks the capture of a graph"
        numbers = [value for value in tree_leaves((args, kwargs)) if not isinstance(value, Tensor)]
        if func.namespace != "profiler":
            self._seen.append((str(func), [repr(value) for value in numbers]))
        return func(*args, **(kwargs or {}))


@contextmanager
def record_issued() -> Iterator[list[Any]]:
    """Record the block's operations, with the numbers from the host, which a graph would keep.

    Raises:
        AssertionError: one of them cannot be captured.
    """
    seen: list[Any] = []

    def refused(tensor: Tensor, *_: Any) -> None:
        raise AssertionError("the host reads a tensor")

    with pytest.MonkeyPatch.context() as patch:
        for name in ("tolist", "numpy", "cpu", "item", "__bool__", "__float__", "__int__"):
            patch.setattr(Tensor, name, refused)
        for name in _LAUNCHES:
            patch.setattr(_native, name, _record_launch(name, getattr(_native, name), seen))
        with _OperationRecorder(seen):
            yield seen


def _record_launch(name: str, launch: Any, seen: list[Any]) -> Any:
    def recorded(*arguments: Any) -> Any:
        seen.append((name, [_launch_numbers(name, value) for value in arguments]))
        return launch(*arguments)

    return recorded


def _launch_numbers(name: str, value: Any) -> Any:
    """Return a launch's argument without addresses of gradients, which a captured backward may place anywhere."""
    if isinstance(value, _C.View):
        return (value.count, value.dtype)
    if name == "flat_adam" and isinstance(value, list) and value and len(value[0]) == 12:
        return [(*row[:6], *row[7:]) for row in value]
    if name == "pack" and isinstance(value, list):
        return [part[2:] for part in value]
    return repr(value)
