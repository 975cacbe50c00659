"""Reference of flat_adam."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from npuzero.ops.reference import _flat
from npuzero.ops.reference._flat import float32_scalar

# exp_avg, exp_avg_sq, max_exp_avg_sq: whether signed, whether rounded stochastically.
_KINDS = ((True, False), (False, True), (False, False))


class AdamCoefficients(NamedTuple):
    """Hold the constants of an update for kernel and reference: float64, rounded once to float32.

    The order is FlatAdamGroup's.
    """

    beta1: float
    one_minus_beta1: float
    beta2: float
    one_minus_beta2: float
    eps: float
    weight_decay: float
    decay: float
    step_size: float
    bias2_sqrt: float
    l2: bool
    maximize: bool
    amsgrad: bool
    step: int
    row: int


def reference_flat_adam(*arguments: Any) -> None:
    """Update by :func:`npuzero.ops.reference._flat.reference_update`, with its arguments from ``buffers`` on."""
    _flat.reference_update(_adam_formula, _KINDS, _count_moments, _with_adam_row, *arguments)


def _count_moments(k: AdamCoefficients) -> int:
    return 3 if k.amsgrad else 2


def _with_adam_row(k: AdamCoefficients, row: list[Any]) -> AdamCoefficients:
    step_size, bias2_sqrt, decay, step = row
    return k._replace(step_size=step_size, bias2_sqrt=bias2_sqrt, decay=decay, step=int(step))


def _adam_formula(p: Tensor, g: Tensor, k: AdamCoefficients, m: Tensor, v: Tensor, top: Tensor | None = None) -> None:
    """Apply the formula, in place."""
    if k.maximize:
        g = -g
    if k.l2:
        g = g + float32_scalar(k.weight_decay, p) * p
    decayed = p * float32_scalar(k.decay, p)
    m.copy_(float32_scalar(k.beta1, p) * m + float32_scalar(k.one_minus_beta1, p) * g)
    v.copy_(float32_scalar(k.beta2, p) * v + (float32_scalar(k.one_minus_beta2, p) * g) * g)
    x = v
    if top is not None:
        x = top.copy_(torch.maximum(top, v))
    p.copy_(
        decayed
        - (float32_scalar(k.step_size, p) * m)
        / (_correctly_rounded_sqrt(x) / float32_scalar(k.bias2_sqrt, p) + float32_scalar(k.eps, p))
    )


def _correctly_rounded_sqrt(x: Tensor) -> Tensor:
    # torch's float32 square root is not correctly rounded in every build (MKL's differs by 1 ulp in places). Via
    # float64 it is: the root of a 24-bit number is at least 2^-49 away from the middle of two float32 numbers.
    return x.double().sqrt().float()
