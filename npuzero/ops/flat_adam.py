"""One Adam/AdamW update of a flat shard, or of many tensors, by one launch.

Formula and contract: csrc/ops/flat_adam.h.
"""

from __future__ import annotations

import bisect
import ctypes
import itertools
import math
import operator
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from operator import attrgetter
from typing import Any, NamedTuple, NoReturn

import torch

from npuzero import _native
from npuzero.errors import ContractError
from npuzero.ops import _check
from npuzero.ops.reference import flat_adam as reference
from npuzero.ops.storage import stored_numel
from npuzero.plan import MOMENT_BLOCK


@dataclass(frozen=True)
class Segment:
    """A range [begin, end) of the line, in elements, and how it is updated; names as in torch.optim.Adam.

    `step` counts from 1 and already includes this update. `decoupled` is AdamW's weight decay, else it is L2's. `row`:
    the row of `dynamic` that has the coefficients of lr and step, which are then not looked at.

    Random bits (where something is rounded stochastically) depend on seed, step, stream and place alone: `stream` says
    of which parameter the elements are, `place` where in it `begin` lies (None: the line is the parameter).
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
    step: int
    row: int


Tensors = torch.Tensor | Sequence[torch.Tensor]
SomeTensors = torch.Tensor | Sequence[torch.Tensor | None] | None

#: What a row of `dynamic` holds, see :func:`flat_adam`.
DYNAMIC = ("step_size", "bias2_sqrt", "decay", "step")

_F32, _LOW = (torch.float32,), (torch.bfloat16, torch.float16)
_MASTERS, _MOMENTS = (torch.float32, torch.bfloat16), (torch.float32, torch.bfloat16, torch.uint8)
# The buffers in the order of a row of csrc/bindings.cpp; all but the last are written.
_BUFFERS = ("master", "exp_avg", "exp_avg_sq", "max_exp_avg_sq", "low", "remainder", "grad")


def flat_adam(
    master: Tensors,
    exp_avg: Tensors,
    exp_avg_sq: Tensors,
    grad: Tensors,
    segments: Iterable[Segment],
    *,
    low: SomeTensors = None,
    remainder: SomeTensors = None,
    max_exp_avg_sq: SomeTensors = None,
    grad_scale: torch.Tensor | None = None,
    skip: torch.Tensor | None = None,
    dynamic: torch.Tensor | None = None,
    seed: int = 0,
) -> None:
    """Updates the covered ranges of master and moments in place; the rest is neither read nor written.

    Each buffer is one tensor, such as a flat shard's, or a sequence of tensors, one for each of `master`'s and of as
    many elements. The segments are ranges of the line: of the tensors laid end to end.

    Args:
        master: any shape, contiguous; in place. float32; or bfloat16, which is with a remainder the upper half of a
            float32, without one rounded stochastically.
        exp_avg, exp_avg_sq: as many elements; float32; bfloat16; or uint8 as :func:`stored_numel` of them: 8-bit codes
            and an exponent for each MOMENT_BLOCK. Both alike; in place.
        grad: float32, bfloat16 or float16; in a sequence not necessarily all the same.
        segments: ascending and disjoint. Where moments are uint8, begins are whole blocks of their tensor, and of a
            block that is covered in part only the rest is not kept.
        low: bfloat16 (ties away from zero, as the upper half) or float16 (ties to even): gets float32 masters rounded.
            None, or None in a sequence, where there is none.
        remainder: int16: the lower half of masters whose upper half is bfloat16; else as low.
        max_exp_avg_sq: as exp_avg_sq; needed where a segment has amsgrad, else as low.
        grad_scale: float32[1] that multiplies the gradient.
        skip: float32[1]; where it is not zero nothing is written.
        dynamic: float32[rows, 4]: step_size = lr / (1 - beta1^step), bias2_sqrt = sqrt(1 - beta2^step), decay
            (1 - lr * weight_decay where decoupled, else 1) and step of the segments that name a row, for lr and steps
            that only the device knows; :func:`npuzero.optim.dynamic_rows` makes it.
        seed: in [0, 2^64), of what is rounded stochastically: exp_avg_sq where it is not float32, masters in bfloat16.

    Raises:
        ContractError: wrong dtype, device, length or hyper-parameter, segments out of order, or shared memory.
        KernelUnavailable: no kernel for this device in this build.
    """
    line = Line(master, exp_avg, exp_avg_sq, low=low, remainder=remainder, max_exp_avg_sq=max_exp_avg_sq, seed=seed)
    line.update(grad, segments, grad_scale, skip, dynamic)


class Line:
    """The buffers that launch after launch writes, checked once; arguments and errors are :func:`flat_adam`'s."""

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
        masters = _check.line("flat_adam", "master", master, _MASTERS)
        self._device = device = masters[0].device if masters else None
        self._counts = counts = [tensor.numel() for tensor in masters]
        stored = _stored_counts(exp_avg, counts)
        self._written: list[Sequence[Any]] = [
            masters,
            _check.line("flat_adam", "exp_avg", exp_avg, _MOMENTS, device, stored),
            _check.line("flat_adam", "exp_avg_sq", exp_avg_sq, _MOMENTS, device, stored),
            _check.line("flat_adam", "max_exp_avg_sq", max_exp_avg_sq, _MOMENTS, device, stored, optional=True),
            _check.line("flat_adam", "low", low, _LOW, device, counts, optional=True),
            _check.line("flat_adam", "remainder", remainder, (torch.int16,), device, counts, optional=True),
        ]
        _check_dtypes(*self._written)
        _check.integer("flat_adam", "seed", seed, 0, 2**64 - 1)
        self._seed = seed
        self._blocks = [bool(tensor.dtype == torch.uint8) for tensor in self._written[1]]
        self._at = [_addresses(tensors) for tensors in self._written]
        self._read: tuple[list[int], ...] = ()
        self._rows: list[tuple[int, ...]] = []

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
        """Whether these are its tensors, and lie where and as they lay: then it need not be made anew."""
        line = (master, exp_avg, exp_avg_sq, max_exp_avg_sq, low, remainder or (None,) * len(low))
        return (
            [tensor.numel() for tensor in master] == self._counts
            and all(all(map(operator.is_, tensors, mine)) for tensors, mine in zip(line, self._written, strict=True))
            and [_addresses(tensors) for tensors in line] == self._at
            and all(tensor.is_contiguous() for tensor in master)
        )

    def update(
        self,
        grad: Tensors,
        segments: Iterable[Segment],
        grad_scale: torch.Tensor | None = None,
        skip: torch.Tensor | None = None,
        dynamic: torch.Tensor | None = None,
    ) -> None:
        """One launch."""
        grads = _check.line("flat_adam", "grad", grad, _check.FLOATS, self._device, self._counts)
        named = (("grad_scale", grad_scale), ("skip", skip), ("dynamic", dynamic))
        scalars = [(name, value) for name, value in named if value is not None]
        for name, value in scalars:
            if value is dynamic:
                _check.table("flat_adam", name, value, _F32, self._device, len(DYNAMIC))
            else:
                _check.flat("flat_adam", name, value, _F32, self._device, 1)
        read = (
            [tensor.data_ptr() for tensor in grads],
            [_native.DTYPES[tensor.dtype] for tensor in grads],
            [value.data_ptr() for _, value in scalars],
        )
        if read != self._read:
            at = [*self._at, read[0]]
            _check_apart([*self._written, grads], at, scalars)
            dtypes = [_dtypes(self._written[i]) for i in (0, 1, 4)]  # of masters, moments, low
            self._rows = list(zip(*at, self._counts, *dtypes, read[1], strict=True))
            self._read = read
        ranges, groups = prepare(
            segments, self._counts, self._written[3], self._blocks, 0 if dynamic is None else len(dynamic)
        )
        if not ranges:
            return
        if _native.backend() == "reference":
            buffers = [*self._written, grads]
            reference.flat_adam(buffers, ranges, groups, grad_scale, skip, dynamic, self._seed)
            return
        device = self._written[0][0].device
        _native.flat_adam(
            self._rows,
            ranges,
            groups,
            _native.optional_view(grad_scale),
            _native.optional_view(skip),
            _native.optional_view(dynamic),
            self._seed,
            _native.device_kind(device),
            _native.stream(device),
        )


def _dtypes(tensors: Sequence[torch.Tensor | None]) -> list[int]:
    return [0 if tensor is None else _native.DTYPES[tensor.dtype] for tensor in tensors]


def _stored_counts(moments: Tensors, counts: Sequence[int]) -> Sequence[int]:
    """Of how many elements a moment's tensors must be."""
    tensors = (moments,) if isinstance(moments, torch.Tensor) else moments
    if len(tensors) != len(counts):
        return counts  # which is what will be refused
    dtypes = [getattr(tensor, "dtype", None) for tensor in tensors]
    return [stored_numel(n, dtype) if dtype == torch.uint8 else n for n, dtype in zip(counts, dtypes, strict=True)]


def _check_dtypes(
    master: Sequence[torch.Tensor],
    exp_avg: Sequence[torch.Tensor],
    exp_avg_sq: Sequence[torch.Tensor],
    max_exp_avg_sq: Sequence[torch.Tensor | None],
    low: Sequence[torch.Tensor | None],
    remainder: Sequence[torch.Tensor | None],
) -> None:
    """Moments of one tensor are stored alike, and beside a master lies what goes with it."""
    for i, tensors in enumerate(zip(master, exp_avg, exp_avg_sq, max_exp_avg_sq, low, remainder, strict=True)):
        p, m, v, top, rounded, rest = tensors
        for name, other in (("exp_avg_sq", v), ("max_exp_avg_sq", top)):
            if other is not None and other.dtype != m.dtype:
                _refuse_dtype(name, i, len(master), f"{_check.short(m.dtype)}, as exp_avg", _check.short(other.dtype))
        absent, why = ("low", rounded), "a bfloat16 master, which is the rounded one itself"
        if p.dtype == torch.float32:
            absent, why = ("remainder", rest), "a float32 master"
        if absent[1] is not None:
            _refuse_dtype(absent[0], i, len(master), f"none beside {why}", "a tensor")


def _refuse_dtype(name: str, i: int, n: int, expected: str, got: str) -> NoReturn:
    raise ContractError(
        f"flat_adam: {name}[{i}]" if n > 1 else f"flat_adam: {name}",
        expected=expected,
        got=got,
        do="Make the buffers of one tensor by one precision.",
    )


def _addresses(tensors: Sequence[torch.Tensor | None]) -> list[int]:
    return [0 if tensor is None else tensor.data_ptr() for tensor in tensors]


def _check_apart(
    line: Sequence[Sequence[torch.Tensor | None]], at: list[list[int]], scalars: list[tuple[str, torch.Tensor]]
) -> None:
    """No buffer shares memory with another; gradients and scalars, which are only read, may with each other."""
    n = len(at[0])

    def name(i: int) -> str:
        if i >= n * len(line):
            return scalars[i - n * len(line)][0]
        return f"{_BUFFERS[i // n]}[{i % n}]" if n > 1 else _BUFFERS[i]

    begins = [*itertools.chain(*at), *(value.data_ptr() for _, value in scalars)]
    sizes = [0 if tensor is None else tensor.nbytes for tensor in itertools.chain(*line)]
    sizes += [value.nbytes for _, value in scalars]
    _check.apart("flat_adam", begins, sizes, n * (len(line) - 1), name)


_RANGE = attrgetter("begin", "end", "stream", "place")
_HYPER = attrgetter("lr", "beta1", "beta2", "eps", "weight_decay", "step", "decoupled", "maximize", "amsgrad", "row")


def prepare(
    segments: Iterable[Segment],
    counts: Sequence[int],
    max_exp_avg_sq: Sequence[torch.Tensor | None],
    blocks: Sequence[bool],
    rows: int,
) -> tuple[list[tuple[int, int, int, int, int]], list[Coefficients]]:
    """Checked (begin, end, index of coefficients, stream, place), like neighbours joined; the coefficients.

    Args:
        blocks: of each tensor, whether its moments are stored in blocks.
        rows: that dynamic has.
    """
    n = sum(counts)
    bounds = [0, *itertools.accumulate(counts)]
    without_max = [(bounds[i], bounds[i + 1]) for i, tensor in enumerate(max_exp_avg_sq) if tensor is None]
    in_blocks = {i for i, blocked in enumerate(blocks) if blocked}
    ranges: list[tuple[int, int, int, int, int]] = []
    index: dict[tuple[Any, ...], int] = {}
    groups: list[Coefficients] = []
    last = 0
    for i, segment in enumerate(segments):
        begin, end, stream, place = _RANGE(segment)
        if not last <= begin <= end <= n:
            raise ContractError(
                f"flat_adam: segments[{i}]",
                expected=f"ascending ranges in [{last}, {n}]",
                got=f"[{begin}, {end})",
                do="Sort the segments and remove overlaps.",
            )
        if segment.amsgrad and any(begin < bound and start < end for start, bound in without_max):
            _refuse_hyper(i, segment, "amsgrad", "False without max_exp_avg_sq")
        tensor = bisect.bisect_right(bounds, begin) - 1 if in_blocks else -1
        if tensor in in_blocks and (begin - bounds[tensor]) % MOMENT_BLOCK:
            _refuse_hyper(
                i, segment, "begin", f"a multiple of {MOMENT_BLOCK} from the start of a tensor of uint8 moments"
            )
        place = begin if place is None else place
        hyper = _HYPER(segment)
        group = index.get(hyper)
        if group is None:
            _check_hyper(i, segment, rows)
            group = index[hyper] = len(groups)
            groups.append(coefficients(segment))
        if ranges and begin == last and ranges[-1][2:] == (group, stream, place - begin + ranges[-1][0]):
            ranges[-1] = (ranges[-1][0], end, *ranges[-1][2:])
        else:
            if not (0 <= stream < 2**31 and 0 <= place < 2**62):
                _refuse_hyper(
                    i, segment, "stream" if 0 <= place < 2**62 else "place", "in [0, 2^31), place in [0, 2^62)"
                )
            ranges.append((begin, end, group, stream, place))
        last = end
    return ranges, groups


def coefficients(segment: Segment) -> Coefficients:
    """The float32 constants of one update."""
    if segment.row is not None:
        segment = replace(segment, lr=0.0, step=1)
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
        step=segment.step % 2**32,
        row=-1 if segment.row is None else segment.row,
    )


def float32(value: float) -> float:
    """`value` rounded to float32."""
    return ctypes.c_float(value).value


def _check_hyper(i: int, segment: Segment, rows: int) -> None:
    finite = math.isfinite
    here = segment.row is None
    rules: Sequence[tuple[str, bool, str]] = (
        ("row", segment.row is None or 0 <= segment.row < rows, f"None or one of dynamic's {rows}"),
        ("lr", not here or finite(segment.lr), "a finite number"),
        ("beta1", 0 <= segment.beta1 < 1, "in [0, 1)"),
        ("beta2", 0 <= segment.beta2 < 1, "in [0, 1)"),
        ("eps", finite(segment.eps) and segment.eps >= 0, "finite and not negative"),
        ("weight_decay", finite(segment.weight_decay) and segment.weight_decay >= 0, "finite and not negative"),
        ("step", not here or segment.step >= 1, "at least 1 (it counts this update)"),
    )
    for name, holds, expected in rules:
        if not holds:
            _refuse_hyper(i, segment, name, expected)


def _refuse_hyper(i: int, segment: Segment, name: str, expected: str) -> NoReturn:
    raise ContractError(
        f"flat_adam: segments[{i}].{name}",
        expected=expected,
        got=repr(getattr(segment, name)),
        do="Correct the parameter group.",
    )
