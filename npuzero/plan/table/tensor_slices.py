"""Cuts: the part of a tensor that each rank along an axis holds. Pure arithmetic.

A cut divides one dimension. If several tensors are packed there (queries, keys and values in one weight; gate and up),
each span is divided separately, and a rank's part is the concatenation of its part of each span::

    spans      4          2     2       of one dimension, over two ranks
               0 1  2 3   4  5  6  7
    rank 0     0 1        4     6
    rank 1          2 3      5     7

Sources: column and row parallel layers of Shoeybi et al., Megatron-LM (2019), section 3.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from npuzero.errors import ConfigError
from npuzero.plan.table.mesh_shape import divisors
from npuzero.plan.table.placement import Axes


@dataclass(frozen=True)
class Cut:
    """Describe how a tensor is divided into equal parts over the ranks along a mesh axis.

    Attributes:
        axis: mesh axis; or several, outermost first, which count as one axis.
        dim: dimension that is divided.
        spans: sizes of the tensors packed along ``dim``, each divided separately; ``()``: the dimension is one span.
        uneven: allow any size of the first dimension: the first parts have one row more than the last ones, which are
            padded by one row, so that all parts have equal size.

    Raises:
        ConfigError: no axis, a negative dimension, a span that is not a positive size, or an uneven cut of another
            dimension than the first.

    Example::

        columns = Cut("tensor", 0)  # output features of a Linear
        packed = Cut("tensor", 0, (64, 16, 16))  # of queries, keys and values in one Linear
    """

    axis: str | Axes
    dim: int
    spans: tuple[int, ...] = ()
    uneven: bool = False

    def __post_init__(self) -> None:
        # bool is an int in Python: True must not pass for a size. Uneven cuts pad rows of dimension 0 only.
        counts = (self.dim, *self.spans) if isinstance(self.spans, tuple) else ()
        whole = bool(counts) and all(isinstance(n, int) and not isinstance(n, bool) for n in counts)
        fits = not self.uneven or not (self.dim or self.spans)
        if not (self.axis and whole and fits and self.dim >= 0 and all(span > 0 for span in self.spans)):
            raise ConfigError(
                "cut",
                expected="an axis, a dimension counted from 0, and spans as a tuple of positive sizes",
                got=f"axis {self.axis!r}, dim {self.dim!r}, spans {self.spans!r}",
                do='Give e.g. Cut("tensor", 0), or Cut("tensor", 0, (64, 16, 16)).',
            )

    @property
    def axes(self) -> Axes:
        """Return the mesh axes that hold the parts."""
        return (self.axis,) if isinstance(self.axis, str) else self.axis

    def check(self, name: str, shape: Sequence[int], n: int) -> None:
        """Check that the parameter ``name`` of this unsharded shape can be divided over ``n`` ranks.

        Raises:
            ConfigError: the dimension does not exist, the spans do not add up to it, or a span cannot be divided.
        """
        subject = f"parameter {name}: cut over {self._called} along dimension {self.dim}"
        if self.dim >= len(shape) or (self.spans and sum(self.spans) != shape[self.dim]):
            spans = f", of which the spans {self.spans} are {sum(self.spans)}" if self.spans else ""
            raise ConfigError(
                subject,
                expected=f"shape {tuple(shape)} to have that dimension"
                + (", and the spans to add up to it" * bool(spans)),
                got=f"{len(shape)} dimensions{spans}",
                do="Give a dimension of the parameter, and the sizes of all that is packed along it, or no spans.",
            )
        whole = self._spans(shape)
        # An uneven cut pads the last parts, but each rank still needs one row at least.
        wrong = next((span for span in whole if (span < n if self.uneven else span % n)), None)
        if wrong is not None:
            common = math.gcd(*whole)
            fitting = ", ".join(map(str, divisors(common)))
            raise ConfigError(
                subject,
                expected=f"a size that {n} ranks {'all have a part of' if self.uneven else 'divide'}"
                + (f" in every span of {whole}" if self.spans else ""),
                got=f"{wrong}" + (f" of shape {tuple(shape)}" if not self.spans else ""),
                do=f"Give the axis {self._called} one of these sizes: {fitting}; or leave the parameter uncut.",
            )

    def shape(self, whole: Sequence[int], n: int) -> torch.Size:
        """Return the shape of one of ``n`` parts of a tensor; ``whole`` is the tensor's shape."""
        return torch.Size((*whole[: self.dim], -(-whole[self.dim] // n), *whole[self.dim + 1 :]))

    def pieces(self, whole: Sequence[int], n: int, index: int) -> list[tuple[int, int]]:
        """Return the ranges ``[begin, end)`` of the cut dimension in part ``index`` of ``n``, in order."""
        if n == 1:
            return [(0, whole[self.dim])]
        if self.uneven:
            share, more = divmod(whole[0], n)
            begin = index * share + min(index, more)
            return [(begin, begin + share + (index < more))]
        begins = itertools.accumulate(self._spans(whole), initial=0)
        sizes = [span // n for span in self._spans(whole)]
        return [(begin + index * size, begin + (index + 1) * size) for begin, size in zip(begins, sizes, strict=False)]

    def take(self, whole: Tensor, n: int, index: int) -> Tensor:
        """Return part ``index`` of ``n`` of a tensor; a view if it is one range."""
        ranges = [whole.narrow(self.dim, a, b - a) for a, b in self.pieces(whole.shape, n, index)]
        padding = self.shape(whole.shape, n)[self.dim] - sum(each.shape[self.dim] for each in ranges)
        if padding:
            ranges.append(whole.new_zeros(padding, *whole.shape[1:]))
        return ranges[0] if len(ranges) == 1 else torch.cat(ranges, self.dim)

    def put(self, whole: Tensor, n: int, index: int, part: Tensor) -> None:
        """Write ``part``, part ``index`` of ``n``, into its place in a tensor."""
        pieces = self.pieces(whole.shape, n, index)
        sizes = [b - a for a, b in pieces]
        present = part.narrow(self.dim, 0, sum(sizes))
        for (begin, end), values in zip(pieces, present.split(sizes, self.dim), strict=True):
            whole.narrow(self.dim, begin, end - begin).copy_(values)

    def _spans(self, whole: Sequence[int]) -> tuple[int, ...]:
        return self.spans or (whole[self.dim],)

    @property
    def _called(self) -> str:
        return "+".join(self.axes)


@dataclass(frozen=True)
class CutBlock:
    """Describe consecutive elements of a tensor, and the part they belong to.

    Attributes:
        begin, end: range of elements of the tensor.
        owner: the part that has all of them; None: each part has an equal share.
        start: first element of this block within the owner, or within each part.
    """

    begin: int
    end: int
    owner: int | None
    start: int


@dataclass(frozen=True)
class TensorPortion:
    """Describe one rank's part of a cut tensor.

    Attributes:
        cut: the cut.
        whole: shape of the unsharded tensor.
        count, index: number of parts, and the index of this one.
    """

    cut: Cut
    whole: torch.Size
    count: int
    index: int

    @property
    def shape(self) -> torch.Size:
        """Return the shape of the part."""
        return self.cut.shape(self.whole, self.count)

    @property
    def pieces(self) -> list[tuple[int, int]]:
        """Return the ranges of the cut dimension in this part."""
        return self.cut.pieces(self.whole, self.count, self.index)

    def of(self, index: int) -> TensorPortion:
        """Return another part of the same tensor."""
        return replace(self, index=index)

    def take(self, whole: Tensor) -> Tensor:
        """Return this part of an unsharded tensor."""
        return self.cut.take(whole, self.count, self.index)

    def blocks(self, limit: int) -> Iterator[CutBlock]:
        """Yield blocks of the tensor's elements in order, each of at most ``limit`` elements.

        A block is a number of rows of all parts if a row fits ``limit``. Else, or if the first dimension is cut, it is
        a range of one part.
        """
        dim = self.cut.dim
        rows, inner = self.whole[:dim].numel(), self.whole[dim + 1 :].numel()
        row = self.whole[dim:].numel()
        if not rows * row:
            return
        # Only dimension 0 may be cut unevenly: here each part has an equal share of every block of rows.
        if rows > 1 and row <= limit and self.count > 1:
            step = limit // row
            for first in range(0, rows, step):
                last = min(first + step, rows)
                yield CutBlock(first * row, last * row, None, first * row // self.count)
            return
        ranges = sorted(
            (begin * inner, end * inner, index) for index in range(self.count) for begin, end in self.of(index).pieces
        )
        had = [0] * self.count
        for first in range(0, rows * row, row):
            for begin, end, owner in ranges:
                for start in range(begin, end, limit):
                    stop = min(start + limit, end)
                    yield CutBlock(first + start, first + stop, owner, had[owner])
                    had[owner] += stop - start

    def share_of(self, block: CutBlock) -> tuple[int, int]:
        """Return the range of this part's elements in a block; may be empty."""
        if block.owner is None:
            return block.start, block.start + (block.end - block.begin) // self.count
        return block.start, block.start + (block.end - block.begin) * (block.owner == self.index)

    def out_of(self, block: CutBlock, values: Tensor) -> Tensor:
        """Return this part's share of a block's elements: 1-D, possibly a view of ``values``."""
        if block.owner is None:
            return self._as_rows.take(self._rows_of(values), self.count, self.index).reshape(-1)
        return values if block.owner == self.index else values[:0]

    def into(self, block: CutBlock, values: Tensor, share: Tensor) -> None:
        """Write this part's share of a block's elements, 1-D, into ``values``."""
        if block.owner is None:
            rows = self._rows_of(values)
            part = share.view(rows.shape[0], rows.shape[1] // self.count, rows.shape[2])
            self._as_rows.put(rows, self.count, self.index, part)
        elif block.owner == self.index:
            values.copy_(share)

    @property
    def _as_rows(self) -> Cut:
        return replace(self.cut, dim=1)

    def _rows_of(self, values: Tensor) -> Tensor:
        return values.view(-1, self.whole[self.cut.dim], self.whole[self.cut.dim + 1 :].numel())
