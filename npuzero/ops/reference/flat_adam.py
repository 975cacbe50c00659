from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from npuzero.ops import storage
from npuzero.ops.reference.cast import draws

if TYPE_CHECKING:
    from npuzero.ops.flat_adam import Coefficients

# What is added to a stream for the draws of exp_avg_sq.
_SECOND = 1 << 31


@torch.no_grad()
def flat_adam(
    buffers: Sequence[Sequence[Tensor | None]],
    ranges: Sequence[tuple[int, int, int, int, int]],
    groups: Sequence[Coefficients],
    grad_scale: Tensor | None,
    skip: Tensor | None,
    dynamic: Tensor | None,
    seed: int,
) -> None:
    """Each range of each tensor in turn, one float32 operation of the formula per torch operation.

    Args:
        buffers: master, exp_avg, exp_avg_sq, max_exp_avg_sq, low, remainder, grad: of each as many tensors.
        ranges: begin and end on the line, index in ``groups``, stream, and begin's place in it.
    """
    if skip is not None and skip.item() != 0:
        return
    start = 0
    for row in zip(*buffers, strict=True):
        master, m, v, top, low, remainder, grad = (x if x is None else x.view(-1) for x in row)
        assert master is not None and m is not None and v is not None and grad is not None
        n = master.numel()
        for begin, end, group, stream, place in ranges:
            mine = slice(max(begin - start, 0), max(min(end - start, n), 0))
            if mine.start >= mine.stop:
                continue
            k = _with_row(groups[group], dynamic)
            places = torch.arange(mine.start, mine.stop) + (place + start - begin)
            g = grad[mine].float()
            if grad_scale is not None:
                g = g * grad_scale
            p = _read_master(master[mine], None if remainder is None else remainder[mine])
            moments = [x for x in (m, v, top if k.amsgrad else None) if x is not None]
            values = [storage.read(x, n, mine, signed=x is m) for x in moments]
            _update(p, g, k, *values)
            if remainder is not None:
                master[mine], remainder[mine] = storage.split(p)
            elif master.dtype == torch.bfloat16:
                master[mine] = storage.stochastic(p, draws(places, seed, stream, k.step))
            else:
                master[mine] = p
            for moment, value in zip(moments, values, strict=True):
                second = moment is v and v.dtype != torch.float32
                bits = draws(places, seed, stream + _SECOND, k.step) if second else None
                storage.write(value, moment, n, mine, signed=moment is m, draws=bits)
            if low is not None:
                low[mine] = storage.upper_half(p) if low.dtype == torch.bfloat16 else p.to(low.dtype)
        start += n


def _read_master(master: Tensor, remainder: Tensor | None) -> Tensor:
    """A copy, in float32."""
    return master.to(torch.float32, copy=True) if remainder is None else storage.join(master, remainder)


def _with_row(k: Coefficients, dynamic: Tensor | None) -> Coefficients:
    if k.row < 0:
        return k
    assert dynamic is not None
    step_size, bias2_sqrt, decay, step = dynamic[k.row].tolist()
    return k._replace(step_size=step_size, bias2_sqrt=bias2_sqrt, decay=decay, step=int(step))


def _update(p: Tensor, g: Tensor, k: Coefficients, m: Tensor, v: Tensor, top: Tensor | None = None) -> None:
    """The formula, in place."""
    if k.maximize:
        g = -g
    if k.l2:
        g = g + _f32(k.weight_decay, p) * p
    decayed = p * _f32(k.decay, p)
    m.copy_(_f32(k.beta1, p) * m + _f32(k.one_minus_beta1, p) * g)
    v.copy_(_f32(k.beta2, p) * v + (_f32(k.one_minus_beta2, p) * g) * g)
    x = v
    if top is not None:
        x = top.copy_(torch.maximum(top, v))
    p.copy_(decayed - (_f32(k.step_size, p) * m) / (_sqrt(x) / _f32(k.bias2_sqrt, p) + _f32(k.eps, p)))


def _sqrt(x: Tensor) -> Tensor:
    # torch's float32 square root is not correctly rounded on every build (MKL's differs by 1 ulp at places). By way of
    # float64 it is: the root of a 24-bit number is never nearer than 2^-49 to the middle of two others.
    return x.double().sqrt().float()


def _f32(value: float, like: Tensor) -> Tensor:
    # A tensor and not a number: torch divides by a number on some devices by multiplying with its inverse.
    return torch.tensor(value, dtype=torch.float32, device=like.device)
