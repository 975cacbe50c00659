"""Moments: what a fused rule keeps of each element beside its master, in as many bits as the precision says."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from npuzero.ops import storage

#: In which dtype a moment is stored, by the name that a precision gives it.
MOMENT_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "int8": torch.uint8}


class Moments:
    """Hold the moments of ``numel`` elements: zeros at first.

    Args:
        signs: by name of a moment, whether it can be negative.
        kind: ``"fp32"``, ``"bf16"`` or ``"int8"``.
        allocate: makes the zeros of a number of elements and a dtype.
    """

    def __init__(
        self, numel: int, signs: Mapping[str, bool], kind: str, allocate: Callable[[int, torch.dtype], Tensor]
    ) -> None:
        dtype = MOMENT_DTYPES[kind]
        self._numel = numel
        self._signs = signs
        #: By name, as they are stored.
        self.stored = {name: allocate(storage.stored_numel(numel, dtype), dtype) for name in signs}

    def read(self, name: str) -> Tensor:
        """Return [numel] float32: a moment; maybe a copy."""
        stored = self.stored[name]
        return stored if stored.dtype == torch.float32 else storage.widen(stored, self._numel, signed=self._signs[name])

    def write(self, name: str, own: slice, values: Tensor) -> None:
        """Replace a range, whole blocks but for its end, by ``values``: what :meth:`read` gave comes back."""
        values = values.to(self.stored[name].device, torch.float32).reshape(-1)
        storage.write(values, self.stored[name], self._numel, own, signed=self._signs[name])
