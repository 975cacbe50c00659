"""Update a flat shard, or many tensors, by Adam or AdamW in one launch.

Formula and contract: csrc/ops/flat_adam.h.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from npuzero import _native
from npuzero.ops import _flat
from npuzero.ops._flat import Rule, SomeTensors, Tensors, round_to_float32
from npuzero.ops.reference import flat_adam as reference


@dataclass(frozen=True)
class AdamSegment:
    """Describe a range [begin, end) of the line, in elements, and its update; names as in torch.optim.Adam.

    `step` counts from 1 and includes this update. `decoupled` is AdamW's weight decay, else it is L2's. Without
    `bias_correction` moments are used without correction, after any number of steps. `row`: the row of `dynamic` with
    the coefficients of lr and step, which are then ignored.

    Random bits (for stochastic rounding) depend only on seed, step, stream and place: `stream` identifies the
    parameter, `place` is the index of `begin` in it (None: the line is the parameter).
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
    row: int | None = None
    stream: int = 0
    place: int | None = None
    bias_correction: bool = True


#: The columns of `dynamic`, see :func:`flat_adam`.
DYNAMIC = ("step_size", "bias2_sqrt", "decay", "step")


def flat_adam(  # noqa: PLR0913 - the contract's buffers, a name each
    master: Tensors,
    exp_avg: Tensors,
    exp_avg_sq: Tensors,
    grad: Tensors,
    segments: Iterable[AdamSegment],
    *,
    low: SomeTensors = None,
    remainder: SomeTensors = None,
    max_exp_avg_sq: SomeTensors = None,
    grad_scale: torch.Tensor | None = None,
    skip: torch.Tensor | None = None,
    dynamic: torch.Tensor | None = None,
    seed: int = 0,
) -> None:
    """Update the covered ranges of master and moments in place; other elements are neither read nor written.

    Each buffer is one tensor, such as a flat shard's, or a sequence of tensors, one for each of `master`'s and with as
    many elements. The segments are ranges of the line: of the concatenated tensors.

    Args:
        master: any shape, contiguous; in place. float32; or bfloat16: with a remainder the upper half of a float32,
            without one rounded stochastically.
        exp_avg, exp_avg_sq: as many elements; float32; bfloat16; or uint8 with :func:`stored_numel` elements: 8-bit
            codes, then an exponent for each MOMENT_BLOCK. Both in the same dtype; in place.
        grad: float32, bfloat16 or float16; dtypes may differ in a sequence.
        segments: ascending and disjoint. With uint8 moments, each begin is a multiple of MOMENT_BLOCK in its tensor;
            the uncovered part of a partly covered block is lost.
        low: bfloat16 (ties away from zero, as the upper half) or float16 (ties to even): gets float32 masters rounded.
            None, or None in a sequence, if there is none.
        remainder: int16: the lower half of masters with the upper half in bfloat16; None as for low.
        max_exp_avg_sq: as exp_avg_sq; required for a segment with amsgrad; None as for low.
        grad_scale: float32[1] that multiplies the gradient.
        skip: float32[1]; if not zero, no buffer is written.
        dynamic: float32[rows, 4]: step_size = lr / (1 - beta1^step), bias2_sqrt = sqrt(1 - beta2^step) (lr and 1
            without bias correction), decay (1 - lr * weight_decay if decoupled, else 1) and step, for segments that
            name a row because only the device knows lr and step; :func:`npuzero.optim.dynamic_rows` makes it.
        seed: in [0, 2^64), for stochastic rounding of: exp_avg_sq unless float32, masters in bfloat16 without
            remainder.

    Raises:
        ContractError: wrong dtype, device, length or hyper-parameter, segments out of order, or shared memory.
        KernelUnavailable: no kernel for this device in this build.
    """
    line = AdamLine(master, exp_avg, exp_avg_sq, low=low, remainder=remainder, max_exp_avg_sq=max_exp_avg_sq, seed=seed)
    line.update(grad, segments, grad_scale, skip, dynamic)


def adam_coefficients(segment: AdamSegment) -> reference.AdamCoefficients:
    """Return the float32 constants of one update."""
    if segment.row is not None:
        segment = replace(segment, lr=0.0, step=1)
    decays = segment.weight_decay != 0
    bias1, bias2 = (
        1 - beta**segment.step if segment.bias_correction else 1.0 for beta in (segment.beta1, segment.beta2)
    )
    return reference.AdamCoefficients(
        *(
            round_to_float32(segment.beta1),
            round_to_float32(1 - segment.beta1),
            round_to_float32(segment.beta2),
            round_to_float32(1 - segment.beta2),
        ),
        eps=round_to_float32(segment.eps),
        weight_decay=round_to_float32(segment.weight_decay),
        decay=round_to_float32(1 - segment.lr * segment.weight_decay) if segment.decoupled and decays else 1.0,
        step_size=round_to_float32(segment.lr / bias1),
        bias2_sqrt=round_to_float32(math.sqrt(bias2)),
        l2=decays and not segment.decoupled,
        maximize=segment.maximize,
        amsgrad=segment.amsgrad,
        step=segment.step % 2**32,
        row=-1 if segment.row is None else segment.row,
    )


class AdamLine(_flat.UpdateLine[AdamSegment]):
    """Hold the buffers of repeated launches, checked once; arguments and errors are :func:`flat_adam`'s."""

    op = "flat_adam"
    moments = ("exp_avg", "exp_avg_sq", "max_exp_avg_sq")
    least_moments = 2
    dynamic = DYNAMIC
    coefficients = staticmethod(adam_coefficients)
    hyper = (
        *("lr", "beta1", "beta2", "eps", "weight_decay", "step", "decoupled", "maximize", "amsgrad", "row"),
        "bias_correction",
    )

    def __init__(
        self,
        master: Tensors,
        exp_avg: Tensors,
        exp_avg_sq: Tensors,
        *,
        low: SomeTensors = None,
        remainder: SomeTensors = None,
        max_exp_avg_sq: SomeTensors = None,
        seed: int = 0,
    ) -> None:
        super().__init__(master, (exp_avg, exp_avg_sq, max_exp_avg_sq), low, remainder, seed)

    def is_of(
        self,
        master: Sequence[torch.Tensor],
        exp_avg: Sequence[torch.Tensor],
        exp_avg_sq: Sequence[torch.Tensor],
        *,
        max_exp_avg_sq: Sequence[torch.Tensor | None],
        low: Sequence[torch.Tensor | None],
        remainder: Sequence[torch.Tensor | None] | None = None,
    ) -> bool:
        """Return whether these are the line's tensors, with unchanged memory: then the line can be reused."""
        return self._is_of((master, exp_avg, exp_avg_sq, max_exp_avg_sq, low, remainder or (None,) * len(low)))

    def _rules(self, segment: AdamSegment) -> Sequence[Rule]:
        return (("eps", math.isfinite(segment.eps) and segment.eps >= 0, "finite and not negative"),)

    def _all_moments(self, segment: AdamSegment) -> str:
        return "amsgrad" if segment.amsgrad else ""

    @staticmethod
    def _run_native(*arguments: Any) -> None:
        _native.flat_adam(*arguments)

    @staticmethod
    def _run_reference(*arguments: Any) -> None:
        reference.reference_flat_adam(*arguments)
