"""Find the tensors in a module's arguments and outputs: nested tuples, lists, mappings and dataclasses."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any

from torch import Tensor


def find_nested_tensors(value: Any) -> tuple[list[Tensor], bool]:
    """Return all tensors in nested containers, and whether an object of unknown kind may contain more."""
    if isinstance(value, Tensor):
        return [value], False
    if value is None or isinstance(value, (bool, int, float, str, bytes)):
        return [], False
    children: Iterable[Any]
    if isinstance(value, Mapping):
        children = value.values()
    elif isinstance(value, (tuple, list, set, frozenset)):
        children = value
    elif dataclasses.is_dataclass(value) or hasattr(value, "__dict__"):
        children = vars(value).values() if hasattr(value, "__dict__") else ()
        # Do not search an object of unknown kind deeper: it may refer to anything, even itself or the model.
        if not dataclasses.is_dataclass(value):
            return [t for child in children if isinstance(child, Tensor) for t in [child]], True
    else:
        return [], True
    found: list[Tensor] = []
    opaque = False
    for child in children:
        tensors, hidden = find_nested_tensors(child)
        found += tensors
        opaque = opaque or hidden
    return found, opaque
