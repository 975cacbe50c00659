from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from npuzero.ops.reference import _flat
from npuzero.ops.reference._flat import f32

# exp_avg, exp_avg_sq, max_exp_avg_sq: whether with a sign, whether rounded by chance.
_KINDS = ((True, False), (False, True), (False, False))


class AdamCoefficients(NamedTuple):
    """Hold what kernel and reference are handed: float64, rounded once to float32. Order: FlatAdamGroup's."""

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


def flat_adam(*arguments: Any) -> None:
    """Update as :func:`npuzero.ops.reference._flat.update` does, whose arguments these are from ``buffers`` on."""
    _flat.update(_update, _KINDS, _used, _with_row, *arguments)


def _used(k: AdamCoefficients) -> int:
    return 3 if k.amsgrad else 2


def _with_row(k: AdamCoefficients, row: list[Any]) -> AdamCoefficients:
    step_size, bias2_sqrt, decay, step = row
    return k._replace(step_size=step_size, bias2_sqrt=bias2_sqrt, decay=decay, step=int(step))


def _update(p: Tensor, g: Tensor, k: AdamCoefficients, m: Tensor, v: Tensor, top: Tensor | None = None) -> None:
    """Apply the formula, in place."""
    if k.maximize:
        g = -g
    if k.l2:
        g = g + f32(k.weight_decay, p) * p
    decayed = p * f32(k.decay, p)
    m.copy_(f32(k.beta1, p) * m + f32(k.one_minus_beta1, p) * g)
    v.copy_(f32(k.beta2, p) * v + (f32(k.one_minus_beta2, p) * g) * g)
    x = v
    if top is not None:
        x = top.copy_(torch.maximum(top, v))
    p.copy_(decayed - (f32(k.step_size, p) * m) / (_sqrt(x) / f32(k.bias2_sqrt, p) + f32(k.eps, p)))


def _sqrt(x: Tensor) -> Tensor:
    # torch's float32 square root is not correctly rounded on every build (MKL's differs by 1 ulp at places). By way of
    # float64 it is: the root of a 24-bit number is never nearer than 2^-49 to the middle of two others.
    return x.double().sqrt().float()
