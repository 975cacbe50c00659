"""Update a flat shard, or many tensors, by Lion in one launch.

Formula and contract: csrc/ops/flat_lion.h.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from npuzero import _native
from npuzero.ops import _flat
from npuzero.ops._flat import SomeTensors, Tensors, round_to_float32
from npuzero.ops.reference import flat_lion as reference


@dataclass(frozen=True)
class LionSegment:
    """Describe a range [begin, end) of the line, in elements, and its update.

    `step` counts from 1 and includes this update; only random bits depend on it. `row`: the row of `dynamic` with the
    coefficients of lr and step, which are then ignored. `stream` and `place` are as in
    :class:`npuzero.ops.AdamSegment`.
    """

    begin: int
    end: int
    lr: float
    beta1: float
    beta2: float
    weight_decay: float
    step: int
    maximize: bool = False
    row: int | None = None
    stream: int = 0
    place: int | None = None


#: The columns of `dynamic`, see :func:`flat_lion`.
DYNAMIC = ("step_size", "decay", "step")


def flat_lion(  # noqa: PLR0913 - the contract's buffers, a name each
    master: Tensors,
    exp_avg: Tensors,
    grad: Tensors,
    segments: Iterable[LionSegment],
    *,
    low: SomeTensors = None,
    remainder: SomeTensors = None,
    grad_scale: torch.Tensor | None = None,
    skip: torch.Tensor | None = None,
    dynamic: torch.Tensor | None = None,
    seed: int = 0,
) -> None:
    """Update the covered ranges of master and moment in place; other elements are neither read nor written.

    Buffers, the line and the stored dtypes are as in :func:`npuzero.ops.flat_adam`.

    Args:
        master: any shape, contiguous; in place. float32 or bfloat16.
        exp_avg: as many elements; float32, bfloat16 or uint8; in place. Rounded stochastically unless float32.
        grad: float32, bfloat16 or float16.
        segments: ascending and disjoint.
        low: bfloat16 or float16: gets float32 masters rounded; or None.
        remainder: int16: the lower half of masters with the upper half in bfloat16; or None.
        grad_scale: float32[1] that multiplies the gradient.
        skip: float32[1]; if not zero, no buffer is written.
        dynamic: float32[rows, 3]: step_size = lr, decay = 1 - lr * weight_decay and step, for segments that name a row
            because only the device knows lr and step.
        seed: in [0, 2^64), for stochastic rounding of: exp_avg, and masters in bfloat16 without remainder.

    Raises:
        ContractError: wrong dtype, device, length or hyper-parameter, segments out of order, or shared memory.
        KernelUnavailable: no kernel for this device in this build.
    """
    LionLine(master, exp_avg, low=low, remainder=remainder, seed=seed).update(grad, segments, grad_scale, skip, dynamic)


def lion_coefficients(segment: LionSegment) -> reference.LionCoefficients:
    """Return the float32 constants of one update."""
    if segment.row is not None:
        segment = replace(segment, lr=0.0, step=1)
    return reference.LionCoefficients(
        *(
            round_to_float32(segment.beta1),
            round_to_float32(1 - segment.beta1),
            round_to_float32(segment.beta2),
            round_to_float32(1 - segment.beta2),
        ),
        decay=round_to_float32(1 - segment.lr * segment.weight_decay),
        step_size=round_to_float32(segment.lr),
        maximize=segment.maximize,
        step=segment.step % 2**32,
        row=-1 if segment.row is None else segment.row,
    )


class LionLine(_flat.UpdateLine[LionSegment]):
    """Hold the buffers of repeated launches, checked once; arguments and errors are :func:`flat_lion`'s."""

    op = "flat_lion"
    moments = ("exp_avg",)
    least_moments = 1
    dynamic = DYNAMIC
    coefficients = staticmethod(lion_coefficients)
    hyper = ("lr", "beta1", "beta2", "weight_decay", "step", "maximize", "row")

    def __init__(
        self,
        master: Tensors,
        exp_avg: Tensors,
        *,
        low: SomeTensors = None,
        remainder: SomeTensors = None,
        seed: int = 0,
    ) -> None:
        super().__init__(master, (exp_avg,), low, remainder, seed)

    def is_of(
        self,
        master: Sequence[torch.Tensor],
        exp_avg: Sequence[torch.Tensor],
        *,
        low: Sequence[torch.Tensor | None],
        remainder: Sequence[torch.Tensor | None] | None = None,
    ) -> bool:
        """Return whether these are the line's tensors, with unchanged memory: then the line can be reused."""
        return self._is_of((master, exp_avg, low, remainder or (None,) * len(low)))

    @staticmethod
    def _run_native(*arguments: Any) -> None:
        _native.flat_lion(*arguments)

    @staticmethod
    def _run_reference(*arguments: Any) -> None:
        reference.reference_flat_lion(*arguments)
