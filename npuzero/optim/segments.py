"""Adam and AdamW (Kingma & Ba, 2015; Loshchilov & Hutter, 2019) on flat shards, and on tensors laid end to end."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from npuzero import ops
from npuzero.ops import storage
from npuzero.plan import START_ELEMENTS

#: In which dtype a moment is stored, by the name that a precision gives it.
MOMENT_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "int8": torch.uint8}
#: Moments by torch's names; the last only with amsgrad.
MOMENTS = ("exp_avg", "exp_avg_sq", "max_exp_avg_sq")


class AdamState:
    """Moments of ``numel`` elements, stored as their precision says: zeros at first.

    Args:
        moments: ``"fp32"``, ``"bf16"`` or ``"int8"``.
        allocate: makes the zeros of a number of elements and a dtype.
    """

    def __init__(self, numel: int, moments: str, amsgrad: bool, allocate: Callable[[int, torch.dtype], Tensor]) -> None:
        dtype = MOMENT_DTYPES[moments]
        self._numel = numel
        names = MOMENTS if amsgrad else MOMENTS[:2]
        #: By torch's names, as they are stored.
        self.stored = {name: allocate(storage.stored_numel(numel, dtype), dtype) for name in names}

    def read(self, name: str) -> Tensor:
        """[numel] float32: a moment; maybe a copy."""
        stored = self.stored[name]
        return (
            stored if stored.dtype == torch.float32 else storage.widen(stored, self._numel, signed=name == MOMENTS[0])
        )

    def write(self, name: str, own: slice, values: Tensor) -> None:
        """Replace a range, whole blocks but for its end, by ``values``: what :meth:`read` gave comes back."""
        values = values.to(self.stored[name].device, torch.float32).reshape(-1)
        storage.write(values, self.stored[name], self._numel, own, signed=name == MOMENTS[0])


class Range(NamedTuple):
    """A parameter's part of the line, ``[begin, end)`` in elements: its group's options and its own step count.

    ``row``: the row of :class:`Rows` that knows lr and step instead. ``stream`` and ``place``: as
    :class:`npuzero.ops.Segment` has them, where something is rounded stochastically.
    """

    begin: int
    end: int
    options: Mapping[str, Any]
    step: int
    row: int | None = None
    stream: int = 0
    place: int | None = None


class Rows:
    """The table of what lr and step come to, for launches of which the device alone knows one of the two.

    Args:
        device: where it is needed.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._of: dict[tuple[int, int], int] = {}
        self._options: list[Mapping[str, Any]] = []
        self._steps: list[float | Tensor] = []

    def row(self, options: Mapping[str, Any], step: int | Tensor) -> tuple[int, int | None]:
        """The number of an update and its row: the one if the host knows both step and lr, else the other.

        Args:
            options: its group's.
            step: updates of before, a () tensor on the device; or this one's number.
        """
        counted = isinstance(step, Tensor)
        if not counted and not lies_there(options["lr"], self._device):
            return cast(int, step), None
        row = self._of.setdefault((id(options), id(step) if counted else -cast(int, step)), len(self._of))
        if row == len(self._options):
            self._options.append(options)
            self._steps.append(step + 1 if counted else step)
        return 0, row

    def table(self) -> Tensor | None:
        """[rows, 4] float32; None where nobody has a row."""
        return dynamic_rows(self._options, self._steps, self._device) if self._options else None


def dynamic_rows(options: Sequence[Mapping[str, Any]], steps: Sequence[float | Tensor], device: torch.device) -> Tensor:
    """[rows, 4] float32 on ``device``: what lr and step come to, computed there in float64 without a host's wait.

    Args:
        options: of each row: lr (a number or a tensor of one element), betas, weight_decay, decoupled_weight_decay.
        steps: of each row the step count, this update included; a number or a tensor.
    """
    lr = _column([o["lr"] for o in options], device)
    beta1, beta2 = (_column([o["betas"][i] for o in options], device) for i in (0, 1))
    decay = _column([o["weight_decay"] if o["decoupled_weight_decay"] else 0.0 for o in options], device)
    count = _column(steps, device)
    return torch.stack([lr / (1 - beta1**count), (1 - beta2**count).sqrt(), 1 - lr * decay, count], dim=1).float()


def lies_there(value: float | Tensor, device: torch.device) -> bool:
    """Whether a number is to be read on ``device``. One in the host's memory is read by the host, without a wait."""
    return isinstance(value, Tensor) and (value.device.type != "cpu" or device.type == "cpu")


def _column(values: Sequence[float | Tensor], device: torch.device) -> Tensor:
    wide: dict[str, Any] = {"dtype": torch.float64, "device": device}
    return torch.stack(
        [
            value.to(**wide).view(())
            if isinstance(value, Tensor) and lies_there(value, device)
            # By a kernel: a copy from the host would wait, and cannot be captured.
            else torch.full((), float(value), **wide)
            for value in values
        ]
    )


def segments(ranges: Iterable[Range]) -> list[ops.Segment]:
    """What a launch is told of ``ranges``, which ascend.

    Neighbours that share options and step count become one segment across the padding between them: padding is zero
    in every buffer and stays zero (0 / (0 + eps)), so only eps = 0 keeps them apart, or random bits of their own.
    """
    runs: list[list[Range]] = []  # first and last of those that continue each other
    for part in ranges:
        if runs and _continues(runs[-1][1], part):
            runs[-1][1] = part
        else:
            runs.append([part, part])
    return [_segment(first, last) for first, last in runs]


def _continues(last: Range, part: Range) -> bool:
    """Whether nothing but padding lies between: a parameter left out would take START_ELEMENTS or more."""
    if last.options is not part.options or (last.step, last.row) != (part.step, part.row) or part.place is not None:
        return False
    gap = part.begin - last.end
    return gap == 0 or (gap < START_ELEMENTS and part.options["eps"] > 0)


def _segment(first: Range, last: Range) -> ops.Segment:
    options = last.options
    beta1, beta2 = options["betas"]
    return ops.Segment(
        first.begin,
        last.end,
        float(options["lr"]) if last.row is None else 0.0,
        float(beta1),
        float(beta2),
        options["eps"],
        options["weight_decay"],
        last.step,
        options["decoupled_weight_decay"],
        options["maximize"],
        options["amsgrad"],
        last.row,
        first.stream,
        first.place,
    )
