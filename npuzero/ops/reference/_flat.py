"""Run an update's formula over stored masters and moments, in float32."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

from npuzero.ops import storage
from npuzero.ops.reference.cast import stochastic_draws

# Added to a stream for the draws of a moment.
_SECOND = 1 << 31


class UpdateCoefficients(Protocol):
    """Define the fields that every op's coefficients have."""

    @property
    def step(self) -> int: ...
    @property
    def row(self) -> int: ...


K = TypeVar("K", bound=UpdateCoefficients)


@torch.no_grad()
def reference_update(  # noqa: PLR0913, PLR0917 - what the binding of a kernel takes
    formula: Callable[..., None],
    kinds: Sequence[tuple[bool, bool]],
    used: Callable[[K], int],
    with_row: Callable[[K, list[Any]], K],
    buffers: Sequence[Sequence[Tensor | None]],
    ranges: Sequence[tuple[int, int, int, int, int]],
    groups: Sequence[K],
    grad_scale: Tensor | None,
    skip: Tensor | None,
    dynamic: Tensor | None,
    seed: int,
) -> None:
    """Update each range of each tensor in turn, one float32 operation of the formula per torch operation.

    Args:
        formula: (p, g, coefficients, moments...), in place.
        kinds: for each moment, whether it is signed, and whether it is rounded stochastically.
        used: returns the number of moments that coefficients use.
        with_row: returns coefficients with the values of a row of ``dynamic``.
        buffers: master, moments, low, remainder, grad, each with the same number of tensors.
        ranges: begin and end on the line, index in ``groups``, stream, and the place of begin in the stream.
    """
    if skip is not None and skip.item() != 0:
        return
    start = 0
    for tensors in zip(*buffers, strict=True):
        master, *moments, low, remainder, grad = (x if x is None else x.view(-1) for x in tensors)
        assert master is not None and grad is not None
        n = master.numel()
        for begin, end, group, stream, place in ranges:
            mine = slice(max(begin - start, 0), max(min(end - start, n), 0))
            if mine.start >= mine.stop:
                continue
            k = groups[group]
            if k.row >= 0:
                assert dynamic is not None
                k = with_row(k, dynamic[k.row].tolist())
            # Draws are indexed by place in the stream, not in this shard, so that bits do not depend on the sharding.
            places = torch.arange(mine.start, mine.stop) + (place + start - begin)
            g = grad[mine].float()
            if grad_scale is not None:
                g = g * grad_scale
            p = _join_master(master[mine], None if remainder is None else remainder[mine])
            here = [(x, *kind) for x, kind in zip(moments[: used(k)], kinds, strict=False) if x is not None]
            values = [storage.read_moment(x, n, mine, signed=signed) for x, signed, _ in here]
            formula(p, g, k, *values)
            if remainder is not None:
                master[mine], remainder[mine] = storage.split_halves(p)
            elif master.dtype == torch.bfloat16:
                master[mine] = storage.round_stochastically(p, stochastic_draws(places, seed, stream, k.step))
            else:
                master[mine] = p
            for (moment, signed, by_chance), value in zip(here, values, strict=True):
                drawn = by_chance and moment.dtype != torch.float32
                bits = stochastic_draws(places, seed, stream + _SECOND, k.step) if drawn else None
                storage.write_moment(value, moment, n, mine, signed=signed, draws=bits)
            if low is not None:
                low[mine] = storage.upper_half(p) if low.dtype == torch.bfloat16 else p.to(low.dtype)
        start += n


def float32_scalar(value: float, like: Tensor) -> Tensor:
    """Return a number as a tensor on the device of ``like``.

    On some devices torch divides by a Python number by multiplying with its inverse, which rounds differently.
    """
    return torch.tensor(value, dtype=torch.float32, device=like.device)


def _join_master(master: Tensor, remainder: Tensor | None) -> Tensor:
    """Return a copy of the master in float32."""
    return master.to(torch.float32, copy=True) if remainder is None else storage.join_halves(master, remainder)
