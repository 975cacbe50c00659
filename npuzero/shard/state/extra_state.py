"""Extra state: what modules add to their state dict by ``get_extra_state``, made as it is asked for, tensor or not."""

from __future__ import annotations

from typing import Any

from torch import nn


def is_extra_state(name: str) -> bool:
    """Return whether this is the name of a module's extra state, by torch's convention."""
    return name.rpartition(".")[2] == "_extra_state"


def load_extra_state(model: nn.Module, name: str, value: Any) -> None:
    """Give ``value`` to the module whose extra state has this name."""
    model.get_submodule(name.rpartition(".")[0]).set_extra_state(value)
