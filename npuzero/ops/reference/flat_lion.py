"""Reference of flat_lion."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from npuzero.ops.reference import _flat
from npuzero.ops.reference._flat import float32_scalar

# exp_avg: whether signed, whether rounded stochastically.
_KINDS = ((True, True),)


class LionCoefficients(NamedTuple):
    """Hold the constants of an update for kernel and reference: float64, rounded once to float32.

    The order is FlatLionGroup's.
    """

    beta1: float
    one_minus_beta1: float
    beta2: float
    one_minus_beta2: float
    decay: float
    step_size: float
    maximize: bool
    step: int
    row: int


def reference_flat_lion(*arguments: Any) -> None:
    """Update by :func:`npuzero.ops.reference._flat.reference_update`, with its arguments from ``buffers`` on."""
    _flat.reference_update(_lion_formula, _KINDS, lambda k: 1, _with_lion_row, *arguments)


def _with_lion_row(k: LionCoefficients, row: list[Any]) -> LionCoefficients:
    step_size, decay, step = row
    return k._replace(step_size=step_size, decay=decay, step=int(step))


def _lion_formula(p: Tensor, g: Tensor, k: LionCoefficients, m: Tensor) -> None:
    """Apply the formula, in place."""
    if k.maximize:
        g = -g
    c = float32_scalar(k.beta1, p) * m + float32_scalar(k.one_minus_beta1, p) * g
    one = float32_scalar(1.0, p)
    sign = torch.where(c > 0, one, torch.where(c < 0, -one, c))
    p.copy_(p * float32_scalar(k.decay, p) - float32_scalar(k.step_size, p) * sign)
    m.copy_(float32_scalar(k.beta2, p) * m + float32_scalar(k.one_minus_beta2, p) * g)
