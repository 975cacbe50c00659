"""Measure the bytes of tensors that a program makes, at their most: independent of the planner's own meter."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class StorageCounter(TorchDispatchMode):
    """Count the storages that ops make under it and that are not freed yet, and the most that there were.

    What an op takes within and gives back (the scratch memory of a kernel) is not seen.
    """

    def __init__(self) -> None:
        super().__init__()
        self.now = self.most = 0
        self._seen: dict[int, weakref.ref[Any] | None] = {}

    def know(self, tensor: Tensor) -> None:
        """Count this tensor's storage never: it was there before."""
        self._seen[tensor.untyped_storage()._cdata] = None

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for leaf in tree_leaves((args, kwargs)):
            if isinstance(leaf, Tensor) and leaf.untyped_storage()._cdata not in self._seen:
                self.know(leaf)
        out = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(out):
            if isinstance(leaf, Tensor):
                self._made(leaf)
        self.most = max(self.most, self.now)
        return out

    def _made(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        key, nbytes = storage._cdata, storage.nbytes()
        if key in self._seen:
            return

        def freed(_: Any) -> None:
            self.now -= nbytes
            del self._seen[key]

        self._seen[key] = weakref.ref(storage, freed)
        self.now += nbytes


def measure_peak_storage(step: Any) -> int:
    """Return the most bytes of tensors that live at a time while ``step()`` runs, beside those that lived before."""
    with StorageCounter() as storages:
        step()
    return storages.most


def drop_unit_gradients(parameters: Any) -> None:
    """Have the gradients of ``parameters``, those of one unit, dropped once the last of them is there."""
    own = list(parameters)
    arrived: list[Tensor] = []

    def drop(parameter: Tensor) -> None:
        assert parameter.grad is not None
        arrived.append(parameter.grad)
        parameter.grad = None
        if len(arrived) == len(own):
            arrived.clear()

    for parameter in own:
        parameter.register_post_accumulate_grad_hook(drop)


def zero_tokens(*shape: int) -> Tensor:
    """Return tokens, all of them the first of the vocabulary."""
    return torch.zeros(*shape, dtype=torch.long)
