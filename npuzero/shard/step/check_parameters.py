"""Check that a model still has the parameters that it had when it was sharded."""

from __future__ import annotations

from collections.abc import Collection
from operator import is_

import torch
from torch import nn

from npuzero.errors import StateError


class ParameterCheck:
    """Record the present parameters of ``model``, trained and frozen, for later checks.

    Every step checks, so the fast path only compares the entries of the modules' tables with the recorded ones.
    """

    def __init__(self, model: nn.Module, trained: Collection[nn.Parameter], frozen: Collection[nn.Parameter]) -> None:
        self._trained = {id(parameter) for parameter in trained}
        self._frozen = list(frozen)
        self._count(model)

    def _count(self, model: nn.Module) -> None:
        self._tables = [table for module in model.modules() for table in (module._parameters, module._modules)]
        self._values = self._present()

    def _present(self) -> list[object]:
        return [value for table in self._tables for value in table.values()]

    def check(self, model: nn.Module) -> None:
        """Raise a StateError if ``model`` has a new parameter, or trains one that was frozen."""
        present = self._present()
        if len(present) == len(self._values) and all(map(is_, present, self._values)):
            with torch._C.DisableTorchFunctionSubclass():
                if not any(parameter.requires_grad for parameter in self._frozen):
                    return
        self._recount(model)

    def _recount(self, model: nn.Module) -> None:
        # Modules may have been replaced or removed (such as a head): valid as long as no parameter is new.
        frozen = {id(parameter) for parameter in self._frozen}
        for name, parameter in model.named_parameters():
            known = id(parameter)
            with torch._C.DisableTorchFunctionSubclass():
                if known in self._trained or (known in frozen and not parameter.requires_grad):
                    continue
            thawed = known in frozen
            raise StateError(
                f"parameter {name}",
                expected="the parameters there were at npuzero.zero(), trained or frozen as they were",
                got="one thawed since: it has no room for gradients" if thawed else "another one",
                do="Let all train at npuzero.zero() that ever will: what is frozen after it, by requires_grad_(False), "
                "may be thawed at any time."
                if thawed
                else "Shape the model first, then call npuzero.zero(); leave FSDP out.",
            )
        self._count(model)
