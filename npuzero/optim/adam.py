"""Adam and AdamW (Kingma & Ba, 2015; Loshchilov & Hutter, 2019) on flat shards, and on tensors laid end to end."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import Tensor

from npuzero import ops
from npuzero.plan import START_ELEMENTS


@dataclass
class AdamState:
    """Moments of one flat shard: [n] float32 each; ``max_exp_avg_sq`` where a group uses amsgrad."""

    exp_avg: Tensor
    exp_avg_sq: Tensor
    max_exp_avg_sq: Tensor | None = None

    def tensors(self) -> dict[str, Tensor]:
        """By torch's names."""
        named = {"exp_avg": self.exp_avg, "exp_avg_sq": self.exp_avg_sq}
        return named if self.max_exp_avg_sq is None else {**named, "max_exp_avg_sq": self.max_exp_avg_sq}


class Range(NamedTuple):
    """A parameter's part of the line, ``[begin, end)`` in elements: its group's options and its own step count."""

    begin: int
    end: int
    options: Mapping[str, Any]
    step: int


def segments(ranges: Iterable[Range], decoupled: bool) -> list[ops.Segment]:
    """What a launch is told of ``ranges``, which ascend.

    ``decoupled``: weight decay as AdamW's, else as L2 regularization.

    Neighbours that share options and step count become one segment across the padding between them: padding is zero
    in every buffer and stays zero (0 / (0 + eps)), so only eps = 0 keeps them apart.
    """
    runs: list[list[Range]] = []  # first and last of those that continue each other
    for part in ranges:
        if runs and _continues(runs[-1][1], part):
            runs[-1][1] = part
        else:
            runs.append([part, part])
    return [_segment(first.begin, last, decoupled) for first, last in runs]


def _continues(last: Range, part: Range) -> bool:
    """Whether nothing but padding lies between: a parameter left out would take START_ELEMENTS or more."""
    if last.options is not part.options or last.step != part.step:
        return False
    gap = part.begin - last.end
    return gap == 0 or (gap < START_ELEMENTS and part.options["eps"] > 0)


def _segment(begin: int, last: Range, decoupled: bool) -> ops.Segment:
    options = last.options
    beta1, beta2 = options["betas"]
    return ops.Segment(
        begin,
        last.end,
        float(options["lr"]),
        float(beta1),
        float(beta2),
        options["eps"],
        options["weight_decay"],
        last.step,
        decoupled,
        options["maximize"],
        options["amsgrad"],
    )
