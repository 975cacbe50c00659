"""Overlay a module's attributes with those of an engine; a copy of the module does not get them."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable
from typing import Any

from torch import nn


def overlay_attributes(module: nn.Module, **attributes: Any) -> None:
    """Set ``attributes`` on ``module``. ``copy.deepcopy(module)`` omits them, as if it had never been sharded."""
    # Not by setattr: a module returned by torch.compile() would set them on the module inside.
    laid: set[str] = module.__dict__.setdefault("_npuzero_laid", {"_npuzero_laid", "__deepcopy__"})
    laid.update(attributes)
    module.__dict__.update(attributes, __deepcopy__=_make_deepcopy(module, laid))


def _make_deepcopy(module: nn.Module, laid: set[str]) -> Callable[[dict[int, Any]], nn.Module]:
    module_of = weakref.ref(module)

    def deepcopy(memo: dict[int, Any]) -> nn.Module:
        module = module_of()
        assert module is not None
        above = {name: module.__dict__.pop(name) for name in laid}
        try:
            return copy.deepcopy(module, memo)
        finally:
            module.__dict__.update(above)

    return deepcopy
