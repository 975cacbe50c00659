"""Adam and AdamW (Kingma & Ba, 2015; Loshchilov & Hutter, 2019) on flat shards, and on tensors laid end to end."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
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
    """A parameter's part of the line, ``[begin, end)`` in elements: its group's options and its own step count.

    ``row``: the row of :func:`dynamic_rows` that knows lr and step instead.
    """

    begin: int
    end: int
    options: Mapping[str, Any]
    step: int
    row: int | None = None


def dynamic_rows(options: Sequence[Mapping[str, Any]], steps: Tensor, decoupled: bool) -> Tensor:
    """[rows, 4] float32 on the device of ``steps``: what lr and step come to, computed there without a host's wait.

    Args:
        options: of each row: lr (a number or a tensor), betas, weight_decay.
        steps: [rows], any dtype: of each row the step count, this update included.
        decoupled: weight decay as AdamW's, else as L2 regularization.
    """

    lr = _column([o["lr"] for o in options], steps)
    beta1, beta2 = (_column([o["betas"][i] for o in options], steps) for i in (0, 1))
    decay = _column([o["weight_decay"] if decoupled else 0.0 for o in options], steps)
    count = steps.double()
    return torch.stack([lr / (1 - beta1**count), (1 - beta2**count).sqrt(), 1 - lr * decay, count], dim=1).float()


def _column(values: Sequence[float | Tensor], like: Tensor) -> Tensor:
    wide: dict[str, Any] = {"dtype": torch.float64, "device": like.device}
    return torch.stack([v.to(**wide).view(()) if isinstance(v, Tensor) else torch.full((), v, **wide) for v in values])


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
    if last.options is not part.options or (last.step, last.row) != (part.step, part.row):
        return False
    gap = part.begin - last.end
    return gap == 0 or (gap < START_ELEMENTS and part.options["eps"] > 0)


def _segment(begin: int, last: Range, decoupled: bool) -> ops.Segment:
    options = last.options
    beta1, beta2 = options["betas"]
    return ops.Segment(
        begin,
        last.end,
        float(options["lr"]) if last.row is None else 0.0,
        float(beta1),
        float(beta2),
        options["eps"],
        options["weight_decay"],
        last.step,
        decoupled,
        options["maximize"],
        options["amsgrad"],
        last.row,
    )
