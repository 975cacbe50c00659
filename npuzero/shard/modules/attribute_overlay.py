"""An overlay: attributes that an engine sets on a module above those of its class, and that a copy does not get."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable
from typing import Any

from torch import nn


def overlay_attributes(module: nn.Module, **attributes: Any) -> None:
    """Set ``attributes``; ``copy.deepcopy(module)`` makes a module of its class without them, as if never sharded."""
    # Not by setattr: a module that torch.compile() returned would pass it on to the one inside.
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
