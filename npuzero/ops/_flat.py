"""Launch code that the optimizer updates share: buffers checked once, and segments of their line.

Contract: csrc/core/flat.h.
"""

from __future__ import annotations

import bisect
import ctypes
import itertools
import math
import operator
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from operator import attrgetter
from typing import Any, ClassVar, Generic, NoReturn, Protocol, TypeVar

import torch

from npuzero import _native
from npuzero.errors import ContractError
from npuzero.ops import _check
from npuzero.ops.storage import stored_numel
from npuzero.plan import MOMENT_BLOCK

Tensors = torch.Tensor | Sequence[torch.Tensor]
SomeTensors = torch.Tensor | Sequence[torch.Tensor | None] | None

#: begin and end on the line, index of coefficients, stream, and the place of begin in the stream.
Range = tuple[int, int, int, int, int]

_F32, _LOW = (torch.float32,), (torch.bfloat16, torch.float16)
_MASTERS, _MOMENTS = (torch.float32, torch.bfloat16), (torch.float32, torch.bfloat16, torch.uint8)


class UpdateSegment(Protocol):
    """Define the fields that the segments of every update have."""

    @property
    def begin(self) -> int: ...
    @property
    def end(self) -> int: ...
    @property
    def lr(self) -> float: ...
    @property
    def beta1(self) -> float: ...
    @property
    def beta2(self) -> float: ...
    @property
    def weight_decay(self) -> float: ...
    @property
    def step(self) -> int: ...
    @property
    def row(self) -> int | None: ...
    @property
    def stream(self) -> int: ...
    @property
    def place(self) -> int | None: ...


S = TypeVar("S", bound=UpdateSegment)
#: An option's name, whether its value is valid, and the expectation for the error.
Rule = tuple[str, bool, str]

_RANGE = attrgetter("begin", "end", "stream", "place")


class UpdateLine(ABC, Generic[S]):
    """Hold the buffers of repeated launches, checked once; arguments and errors are its op's."""

    op: ClassVar[str]
    moments: ClassVar[tuple[str, ...]]
    #: The number of moments that every tensor has; further ones may be None.
    least_moments: ClassVar[int]
    #: The columns of `dynamic`.
    dynamic: ClassVar[tuple[str, ...]]
    #: The options of a segment that determine its coefficients.
    hyper: ClassVar[tuple[str, ...]]

    def __init__(
        self, master: Tensors, moments: Sequence[SomeTensors], low: SomeTensors, remainder: SomeTensors, seed: int
    ) -> None:
        op = self.op
        masters = _check.check_tensor_line(op, "master", master, _MASTERS)
        self._device = device = masters[0].device if masters else None
        self._counts = counts = [tensor.numel() for tensor in masters]
        stored = _stored_element_counts(moments[0], counts)
        self._moments = [
            _check.check_tensor_line(op, name, moment, _MOMENTS, device, stored, optional=i >= self.least_moments)
            for i, (name, moment) in enumerate(zip(self.moments, moments, strict=True))
        ]
        lows = _check.check_tensor_line(op, "low", low, _LOW, device, counts, optional=True)
        remainders = _check.check_tensor_line(op, "remainder", remainder, (torch.int16,), device, counts, optional=True)
        # The buffers in the order of a row in csrc/bindings.cpp, without the gradient, which is last there.
        self._written: list[Sequence[Any]] = [masters, *self._moments, lows, remainders]
        self._check_dtypes()
        _check.check_integer(op, "seed", seed, 0, 2**64 - 1)
        self._seed = seed
        bounds = [0, *itertools.accumulate(counts)]
        self._bounds = bounds
        self._blocks = {i for i, tensor in enumerate(self._moments[0]) if tensor.dtype == torch.uint8}
        #: Ranges of the line that lack the last moment.
        self._lacking = [(bounds[i], bounds[i + 1]) for i, tensor in enumerate(self._moments[-1]) if tensor is None]
        self._at = [_tensor_addresses(tensors) for tensors in self._written]
        self._read: tuple[list[int], ...] = ()
        self._rows: list[tuple[int, ...]] = []

    @staticmethod
    @abstractmethod
    def coefficients(segment: S) -> Any:
        """Return the float32 constants of one update, in the order of the op's group in C++."""

    def _rules(self, segment: S) -> Sequence[Rule]:
        """Return the rules for a segment's options in addition to :func:`_common_segment_rules`."""
        return ()

    def _all_moments(self, segment: S) -> str:
        """Return the name of the option by which a segment needs the optional moments; "" if it needs none."""
        return ""

    @staticmethod
    @abstractmethod
    def _run_native(*arguments: Any) -> None: ...

    @staticmethod
    @abstractmethod
    def _run_reference(*arguments: Any) -> None: ...

    def _is_of(self, line: Sequence[Sequence[torch.Tensor | None]]) -> bool:
        """Return whether these are the line's tensors, with unchanged memory: then the line can be reused.

        Args:
            line: masters, moments, low, remainder, each with the same number of tensors.
        """
        master: Sequence[Any] = line[0]
        return (
            [tensor.numel() for tensor in master] == self._counts
            and all(all(map(operator.is_, tensors, mine)) for tensors, mine in zip(line, self._written, strict=True))
            and [_tensor_addresses(tensors) for tensors in line] == self._at
            and all(tensor.is_contiguous() for tensor in master)
        )

    def update(
        self,
        grad: Tensors,
        segments: Iterable[S],
        grad_scale: torch.Tensor | None = None,
        skip: torch.Tensor | None = None,
        dynamic: torch.Tensor | None = None,
    ) -> None:
        """Launch the update once."""
        grads = _check.check_tensor_line(self.op, "grad", grad, _check.FLOATS, self._device, self._counts)
        named = (("grad_scale", grad_scale), ("skip", skip), ("dynamic", dynamic))
        scalars = [(name, value) for name, value in named if value is not None]
        for name, value in scalars:
            if value is dynamic:
                _check.check_coefficient_rows(self.op, name, value, _F32, self._device, len(self.dynamic))
            else:
                _check.check_flat_tensor(self.op, name, value, _F32, self._device, 1)
        read = (
            [tensor.data_ptr() for tensor in grads],
            [_native.DTYPES[tensor.dtype] for tensor in grads],
            [value.data_ptr() for _, value in scalars],
        )
        if read != self._read:
            at = [*self._at, read[0]]
            self._check_apart(grads, at, scalars)
            dtypes = [_dtype_codes(self._written[i]) for i in (0, 1, -2)]  # of masters, moments, low
            self._rows = list(zip(*at, self._counts, *dtypes, read[1], strict=True))
            self._read = read
        ranges, groups = self._prepare(segments, 0 if dynamic is None else len(dynamic))
        if not ranges:
            return
        if _native.backend() == "reference":
            buffers = [*self._written, grads]
            self._run_reference(buffers, ranges, groups, grad_scale, skip, dynamic, self._seed)
            return
        device = self._written[0][0].device
        self._run_native(
            self._rows,
            ranges,
            groups,
            _native.optional_view(grad_scale),
            _native.optional_view(skip),
            _native.optional_view(dynamic),
            self._seed,
            _native.device_kind(device),
            _native.current_stream_handle(device),
        )

    def _prepare(self, segments: Iterable[S], rows: int) -> tuple[list[Range], list[Any]]:
        """Check the segments and merge equal neighbours; return the ranges and the coefficients that they index.

        Args:
            rows: the number of rows in dynamic.
        """
        bounds, blocks, lacking = self._bounds, self._blocks, self._lacking
        # Every step passes a segment for each parameter. Options are checked once per distinct set, and neighbours with
        # the same options become one range, so that a launch has few ranges.
        hyper_of = attrgetter(*self.hyper)
        ranges: list[Range] = []
        index: dict[Any, int] = {}
        wanting: dict[int, str] = {}  # by group index, the option that needs a moment which some tensors lack
        groups: list[Any] = []
        last = 0
        for i, segment in enumerate(segments):
            begin, end, stream, place = _RANGE(segment)
            if not last <= begin <= end <= bounds[-1]:
                raise ContractError(
                    f"{self.op}: segments[{i}]",
                    expected=f"ascending ranges in [{last}, {bounds[-1]}]",
                    got=f"[{begin}, {end})",
                    do="Sort the segments and remove overlaps.",
                )
            tensor = bisect.bisect_right(bounds, begin) - 1 if blocks else -1
            if tensor in blocks and (begin - bounds[tensor]) % MOMENT_BLOCK:
                expected = f"a multiple of {MOMENT_BLOCK} from the start of a tensor of uint8 moments"
                self._refuse_hyper(i, segment, "begin", expected)
            place = begin if place is None else place
            hyper = hyper_of(segment)
            group = index.get(hyper)
            if group is None:
                self._check_hyper(i, segment, rows)
                group = index[hyper] = len(groups)
                groups.append(self.coefficients(segment))
                if lacking and (option := self._all_moments(segment)):
                    wanting[group] = option
            if group in wanting and any(begin < bound and start < end for start, bound in lacking):
                self._refuse_hyper(i, segment, wanting[group], f"False without {self.moments[-1]}")
            # Merge only if the draws also continue: place - begin is constant within a range.
            if ranges and begin == last and ranges[-1][2:] == (group, stream, place - begin + ranges[-1][0]):
                ranges[-1] = (ranges[-1][0], end, *ranges[-1][2:])
            else:
                if not (0 <= stream < 2**31 and 0 <= place < 2**62):
                    wrong = "stream" if 0 <= place < 2**62 else "place"
                    self._refuse_hyper(i, segment, wrong, "in [0, 2^31), place in [0, 2^62)")
                ranges.append((begin, end, group, stream, place))
            last = end
        return ranges, groups

    def _check_hyper(self, i: int, segment: S, rows: int) -> None:
        for name, holds, expected in (*_common_segment_rules(segment, rows), *self._rules(segment)):
            if not holds:
                self._refuse_hyper(i, segment, name, expected)

    def _refuse_hyper(self, i: int, segment: S, name: str, expected: str) -> NoReturn:
        raise ContractError(
            f"{self.op}: segments[{i}].{name}",
            expected=expected,
            got=repr(operator.attrgetter(name)(segment)),
            do="Correct the parameter group.",
        )

    def _check_dtypes(self) -> None:
        """Check that a tensor's moments have one dtype, and that low and remainder fit its master's dtype."""
        masters, *moments, lows, remainders = self._written
        for i, (p, rounded, rest, m, *others) in enumerate(zip(masters, lows, remainders, *moments, strict=True)):
            for name, other in zip(self.moments[1:], others, strict=True):
                if other is not None and other.dtype != m.dtype:
                    expected = f"{_check.dtype_name(m.dtype)}, as {self.moments[0]}"
                    self._refuse_dtype(name, i, expected, _check.dtype_name(other.dtype))
            absent, why = ("low", rounded), "a bfloat16 master, which is the rounded one itself"
            if p.dtype == torch.float32:
                absent, why = ("remainder", rest), "a float32 master"
            if absent[1] is not None:
                self._refuse_dtype(absent[0], i, f"none beside {why}", "a tensor")

    def _refuse_dtype(self, name: str, i: int, expected: str, got: str) -> NoReturn:
        raise ContractError(
            f"{self.op}: {name}[{i}]" if len(self._counts) > 1 else f"{self.op}: {name}",
            expected=expected,
            got=got,
            do="Make the buffers of one tensor by one precision.",
        )

    def _check_apart(
        self, grads: Sequence[torch.Tensor], at: list[list[int]], scalars: list[tuple[str, torch.Tensor]]
    ) -> None:
        """Check that no buffer shares memory with another; gradients and scalars are only read and may share."""
        n, line = len(grads), [*self._written, grads]
        names = ("master", *self.moments, "low", "remainder", "grad")

        def name(i: int) -> str:
            if i >= n * len(line):
                return scalars[i - n * len(line)][0]
            return f"{names[i // n]}[{i % n}]" if n > 1 else names[i]

        begins = [*itertools.chain(*at), *(value.data_ptr() for _, value in scalars)]
        sizes = [0 if tensor is None else tensor.nbytes for tensor in itertools.chain(*line)]
        sizes += [value.nbytes for _, value in scalars]
        _check.check_address_ranges(self.op, begins, sizes, n * len(self._written), name)


def round_to_float32(value: float) -> float:
    """Round `value` to float32."""
    return ctypes.c_float(value).value


def _common_segment_rules(segment: UpdateSegment, rows: int) -> Sequence[Rule]:
    here = segment.row is None
    return (
        ("row", segment.row is None or 0 <= segment.row < rows, f"None or one of dynamic's {rows}"),
        ("lr", not here or math.isfinite(segment.lr), "a finite number"),
        ("beta1", 0 <= segment.beta1 < 1, "in [0, 1)"),
        ("beta2", 0 <= segment.beta2 < 1, "in [0, 1)"),
        ("weight_decay", math.isfinite(segment.weight_decay) and segment.weight_decay >= 0, "finite and not negative"),
        ("step", not here or segment.step >= 1, "at least 1 (it counts this update)"),
    )


def _dtype_codes(tensors: Sequence[torch.Tensor | None]) -> list[int]:
    return [0 if tensor is None else _native.DTYPES[tensor.dtype] for tensor in tensors]


def _stored_element_counts(moments: SomeTensors, counts: Sequence[int]) -> Sequence[int]:
    """Return the number of elements that each tensor of a moment must have."""
    tensors = (moments,) if isinstance(moments, torch.Tensor) else moments
    if tensors is None or len(tensors) != len(counts):
        return counts  # the length error is raised later
    dtypes = [getattr(tensor, "dtype", None) for tensor in tensors]
    return [stored_numel(n, dtype) if dtype == torch.uint8 else n for n, dtype in zip(counts, dtypes, strict=True)]


def _tensor_addresses(tensors: Sequence[torch.Tensor | None]) -> list[int]:
    return [0 if tensor is None else tensor.data_ptr() for tensor in tensors]
