"""Extra state: the objects that modules add to their state dict by ``get_extra_state``, tensors or not."""

from __future__ import annotations

from typing import Any

from torch import nn


def is_extra_state(name: str) -> bool:
    """Return whether ``name`` is that of a module's extra state, by torch's convention."""
    return name.rpartition(".")[2] == "_extra_state"


def load_extra_state(model: nn.Module, name: str, value: Any) -> None:
    """Pass ``value`` to ``set_extra_state`` of the module that owns ``name``."""
    model.get_submodule(name.rpartition(".")[0]).set_extra_state(value)
