"""One Adam/AdamW update of a flat shard. Formula and contract: csrc/ops/flat_adam.h."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any, NamedTuple

import torch

from npuzero import _native
from npuzero.errors import ContractError
from npuzero.ops import _check
from npuzero.ops.reference import flat_adam as reference


@dataclass(frozen=True)
class Segment:
    """A range [begin, end) of the flat shard, in elements, and how it is updated; names as in torch.optim.Adam.

    `step` counts from 1 and already includes this update. `decoupled` is AdamW's weight decay, else it is L2's.
    """

    begin: int
    end: int
    lr: float
    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    step: int
    decoupled: bool
    maximize: bool
    amsgrad: bool


class Coefficients(NamedTuple):
    """What kernel and reference are handed: computed in float64, rounded once to float32. Order: FlatAdamGroup's."""

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


def flat_adam(
    master: torch.Tensor,
    exp_avg: torch.Tensor,
    exp_avg_sq: torch.Tensor,
    grad: torch.Tensor,
    segments: Iterable[Segment],
    *,
    low: torch.Tensor | None = None,
    max_exp_avg_sq: torch.Tensor | None = None,
    grad_scale: torch.Tensor | None = None,
    skip: torch.Tensor | None = None,
) -> None:
    """Updates the covered ranges of master and moments in place; the rest is neither read nor written.

    Args:
        master, exp_avg, exp_avg_sq: float32[n], in place.
        grad: float32, bfloat16 or float16[n].
        segments: ascending and disjoint.
        low: bfloat16 or float16[n]: gets master rounded to nearest even.
        max_exp_avg_sq: float32[n], in place; needed where a segment has amsgrad.
        grad_scale: float32[1] that multiplies the gradient.
        skip: float32[1]; where it is not zero nothing is written.

    Raises:
        ContractError: wrong dtype, device, length or hyper-parameter, segments out of order, or shared memory.
        KernelUnavailable: no kernel for this device in this build.
    """
    written = [("master", master), ("exp_avg", exp_avg), ("exp_avg_sq", exp_avg_sq)]
    if max_exp_avg_sq is not None:
        written.append(("max_exp_avg_sq", max_exp_avg_sq))
    scalars = [(name, value) for name, value in (("grad_scale", grad_scale), ("skip", skip)) if value is not None]
    _check.flat("flat_adam", "master", master, (torch.float32,))
    for name, buffer in written:
        _check.flat("flat_adam", name, buffer, (torch.float32,), master.device, master.numel())
    _check.flat("flat_adam", "grad", grad, _check.FLOATS, master.device, master.numel())
    for name, value in scalars:
        _check.flat("flat_adam", name, value, (torch.float32,), master.device, 1)
    if low is not None:
        _check.flat("flat_adam", "low", low, (torch.bfloat16, torch.float16), master.device, master.numel())
        written.append(("low", low))
    _check.disjoint("flat_adam", written, [("grad", grad), *scalars])
    ranges, groups = prepare(segments, master.numel(), max_exp_avg_sq is not None)
    if _native.backend() == "reference":
        reference.flat_adam(master, exp_avg, exp_avg_sq, grad, ranges, groups, low, max_exp_avg_sq, grad_scale, skip)
        return
    view, optional_view = _native.view, _native.optional_view
    _native.flat_adam(
        *(view(master), view(exp_avg), view(exp_avg_sq), view(grad)),
        *(optional_view(low), optional_view(max_exp_avg_sq), optional_view(grad_scale), optional_view(skip)),
        ranges,
        groups,
        _native.stream(master.device),
    )


_RANGE = attrgetter("begin", "end")
_HYPER = attrgetter("lr", "beta1", "beta2", "eps", "weight_decay", "step", "decoupled", "maximize", "amsgrad")


def prepare(
    segments: Iterable[Segment], n: int, has_max: bool
) -> tuple[list[tuple[int, int, int]], list[Coefficients]]:
    """Checked (begin, end, index of coefficients), neighbours of equal hyper-parameters joined; the coefficients."""
    ranges: list[tuple[int, int, int]] = []
    index: dict[tuple[Any, ...], int] = {}
    groups: list[Coefficients] = []
    last = 0
    for i, segment in enumerate(segments):
        begin, end = _RANGE(segment)
        if not last <= begin <= end <= n:
            raise ContractError(
                f"flat_adam: segments[{i}]",
                expected=f"ascending ranges in [{last}, {n}]",
                got=f"[{begin}, {end})",
                do="Sort the segments and remove overlaps.",
            )
        hyper = _HYPER(segment)
        group = index.get(hyper)
        if group is None:
            _check_hyper(i, segment, has_max)
            group = index[hyper] = len(groups)
            groups.append(coefficients(segment))
        if ranges and begin == last and ranges[-1][2] == group:
            ranges[-1] = (ranges[-1][0], end, group)
        else:
            ranges.append((begin, end, group))
        last = end
    return ranges, groups


def coefficients(segment: Segment) -> Coefficients:
    """The float32 constants of one update."""
    decays = segment.weight_decay != 0
    return Coefficients(
        *(float32(segment.beta1), float32(1 - segment.beta1), float32(segment.beta2), float32(1 - segment.beta2)),
        eps=float32(segment.eps),
        weight_decay=float32(segment.weight_decay),
        decay=float32(1 - segment.lr * segment.weight_decay) if segment.decoupled and decays else 1.0,
        step_size=float32(segment.lr / (1 - segment.beta1**segment.step)),
        bias2_sqrt=float32(math.sqrt(1 - segment.beta2**segment.step)),
        l2=decays and not segment.decoupled,
        maximize=segment.maximize,
        amsgrad=segment.amsgrad,
    )


def float32(value: float) -> float:
    """`value` rounded to float32."""
    return ctypes.c_float(value).value


def _check_hyper(i: int, segment: Segment, has_max: bool) -> None:
    finite = math.isfinite
    rules: Sequence[tuple[str, bool, str]] = (
        ("lr", finite(segment.lr), "a finite number"),
        ("beta1", 0 <= segment.beta1 < 1, "in [0, 1)"),
        ("beta2", 0 <= segment.beta2 < 1, "in [0, 1)"),
        ("eps", finite(segment.eps) and segment.eps >= 0, "finite and not negative"),
        ("weight_decay", finite(segment.weight_decay) and segment.weight_decay >= 0, "finite and not negative"),
        ("step", segment.step >= 1, "at least 1 (it counts this update)"),
        ("amsgrad", has_max or not segment.amsgrad, "False without max_exp_avg_sq"),
    )
    for name, holds, expected in rules:
        if not holds:
            raise ContractError(
                f"flat_adam: segments[{i}].{name}",
                expected=expected,
                got=repr(getattr(segment, name)),
                do="Correct the parameter group.",
            )
