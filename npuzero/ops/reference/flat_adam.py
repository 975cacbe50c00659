from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from npuzero.ops.flat_adam import Coefficients


@torch.no_grad()
def flat_adam(
    master: Sequence[torch.Tensor],
    exp_avg: Sequence[torch.Tensor],
    exp_avg_sq: Sequence[torch.Tensor],
    grad: Sequence[torch.Tensor],
    ranges: Sequence[tuple[int, int, int]],
    groups: Sequence[Coefficients],
    low: Sequence[torch.Tensor | None],
    max_exp_avg_sq: Sequence[torch.Tensor | None],
    grad_scale: torch.Tensor | None,
    skip: torch.Tensor | None,
    dynamic: torch.Tensor | None,
) -> None:
    """Each range of each tensor in turn, one float32 operation of the formula per torch operation."""
    if skip is not None and skip.item() != 0:
        return
    start = 0
    for buffers in zip(master, exp_avg, exp_avg_sq, grad, low, max_exp_avg_sq, strict=True):
        for begin, end, group in ranges:
            mine = slice(max(begin - start, 0), max(end - start, 0))
            p, m, v, g, rounded, top = (None if x is None else x.view(-1)[mine] for x in buffers)
            assert p is not None and m is not None and v is not None and g is not None
            g = g.float()
            if grad_scale is not None:
                g = g * grad_scale
            _update(p, m, v, g, top, _with_row(groups[group], dynamic))
            if rounded is not None:
                rounded.copy_(p.to(rounded.dtype))
        start += buffers[0].numel()


def _with_row(k: Coefficients, dynamic: torch.Tensor | None) -> Coefficients:
    if k.row < 0:
        return k
    assert dynamic is not None
    step_size, bias2_sqrt, decay = dynamic[k.row].tolist()
    return k._replace(step_size=step_size, bias2_sqrt=bias2_sqrt, decay=decay)


def _update(
    p: torch.Tensor, m: torch.Tensor, v: torch.Tensor, g: torch.Tensor, top: torch.Tensor | None, k: Coefficients
) -> None:
    if k.maximize:
        g = -g
    if k.l2:
        g = g + _f32(k.weight_decay, p) * p
    decayed = p * _f32(k.decay, p)
    m.copy_(_f32(k.beta1, p) * m + _f32(k.one_minus_beta1, p) * g)
    v.copy_(_f32(k.beta2, p) * v + (_f32(k.one_minus_beta2, p) * g) * g)
    x = v
    if k.amsgrad:
        assert top is not None
        x = top.copy_(torch.maximum(top, v))
    p.copy_(decayed - (_f32(k.step_size, p) * m) / (_sqrt(x) / _f32(k.bias2_sqrt, p) + _f32(k.eps, p)))


def _sqrt(x: torch.Tensor) -> torch.Tensor:
    # torch's float32 square root is not correctly rounded on every build (MKL's differs by 1 ulp at places). By way of
    # float64 it is: the root of a 24-bit number is never nearer than 2^-49 to the middle of two others.
    return x.double().sqrt().float()


def _f32(value: float, like: torch.Tensor) -> torch.Tensor:
    # A tensor and not a number: torch divides by a number on some devices by multiplying with its inverse.
    return torch.tensor(value, dtype=torch.float32, device=like.device)
