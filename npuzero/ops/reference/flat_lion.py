from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from npuzero.ops.reference import _flat
from npuzero.ops.reference._flat import f32

# exp_avg: whether with a sign, whether rounded by chance.
_KINDS = ((True, True),)


class LionCoefficients(NamedTuple):
    """Hold what kernel and reference are handed: float64, rounded once to float32. Order: FlatLionGroup's."""

    beta1: float
    one_minus_beta1: float
    beta2: float
    one_minus_beta2: float
    decay: float
    step_size: float
    maximize: bool
    step: int
    row: int


def flat_lion(*arguments: Any) -> None:
    """Update as :func:`npuzero.ops.reference._flat.update` does, whose arguments these are from ``buffers`` on."""
    _flat.update(_update, _KINDS, lambda k: 1, _with_row, *arguments)


def _with_row(k: LionCoefficients, row: list[Any]) -> LionCoefficients:
    step_size, decay, step = row
    return k._replace(step_size=step_size, decay=decay, step=int(step))


def _update(p: Tensor, g: Tensor, k: LionCoefficients, m: Tensor) -> None:
    """Apply the formula, in place."""
    if k.maximize:
        g = -g
    c = f32(k.beta1, p) * m + f32(k.one_minus_beta1, p) * g
    one = f32(1.0, p)
    sign = torch.where(c > 0, one, torch.where(c < 0, -one, c))
    p.copy_(p * f32(k.decay, p) - f32(k.step_size, p) * sign)
    m.copy_(f32(k.beta2, p) * m + f32(k.one_minus_beta2, p) * g)
