"""Split a contiguous range of a tensor's elements into n-dimensional boxes. Pure arithmetic."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations, product


@dataclass(frozen=True)
class TensorBox:
    """Describe an axis-aligned part of a tensor: its offset and its size in each dimension."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    @property
    def numel(self) -> int:
        return math.prod(self.sizes)

    def __contains__(self, place: Sequence[int]) -> bool:
        return all(o <= at < o + n for o, n, at in zip(self.offsets, self.sizes, place, strict=True))

    def after(self, row: int) -> TensorBox:
        """Return this box in a tensor with ``row`` rows inserted at the front."""
        return TensorBox((self.offsets[0] + row, *self.offsets[1:]), self.sizes) if row else self


def boxes_of(shape: Sequence[int], begin: int, end: int, limit: int | None = None) -> list[TensorBox]:
    """Return the elements ``[begin, end)`` of a contiguous tensor of ``shape``, as boxes in the order of the elements.

    Each box is a contiguous range. There are at most ``2 * dimensions - 1`` of them, plus one for each further cut of a
    box to at most ``limit`` elements.
    """
    shape = tuple(shape)
    return [part for box in _boxes_of_range(shape, begin, end) for part in _split_box(box, limit)]


def _boxes_of_range(shape: tuple[int, ...], begin: int, end: int) -> Iterator[TensorBox]:
    if begin >= end:
        return
    if not shape:
        yield TensorBox((), ())
        return
    row = math.prod(shape[1:])
    first, last = -(-begin // row), end // row  # full rows
    if first > last:  # inside one row
        yield from _boxes_of_row(shape, last, begin - last * row, end - last * row)
        return
    yield from _boxes_of_row(shape, first - 1, begin - (first - 1) * row, row)
    if first < last:
        yield TensorBox((first, *(0 for _ in shape[1:])), (last - first, *shape[1:]))
    yield from _boxes_of_row(shape, last, 0, end - last * row)


def _boxes_of_row(shape: tuple[int, ...], index: int, begin: int, end: int) -> Iterator[TensorBox]:
    """Yield the elements ``[begin, end)`` of row ``index``; a full row is left to the caller."""
    if 0 < end - begin < math.prod(shape[1:]):
        for box in _boxes_of_range(shape[1:], begin, end):
            yield TensorBox((index, *box.offsets), (1, *box.sizes))


def _split_box(box: TensorBox, limit: int | None) -> Iterator[TensorBox]:
    if limit is None or box.numel <= limit:
        yield box
        return
    axis = next(i for i, size in enumerate(box.sizes) if size > 1)
    size = box.sizes[axis]
    step = max(1, limit * size // box.numel)
    for start in range(0, size, step):
        offsets = (*box.offsets[:axis], box.offsets[axis] + start, *box.offsets[axis + 1 :])
        sizes = (*box.sizes[:axis], min(step, size - start), *box.sizes[axis + 1 :])
        yield from _split_box(TensorBox(offsets, sizes), limit)


#: Upper bound of the steps per box in the search for an error.
_STEPS = 4096


def find_coverage_error(shape: Sequence[int], boxes: Sequence[TensorBox]) -> tuple[int, ...] | None:
    """Return an element that is not in exactly one of ``boxes``; None if each is.

    Args:
        boxes: within ``shape``, with as many elements in total.

    Raises:
        ValueError: there are too many, cut along too many dimensions.
    """
    boxes = [box for box in boxes if box.numel]
    axes = [axis for axis, size in enumerate(shape) if any(box.sizes[axis] != size for box in boxes)]
    if min(len(boxes), 1 << len(axes)) > _STEPS:
        raise ValueError(f"{len(boxes)} parts of shape {tuple(shape)}, cut along {len(axes)} dimensions")
    # Many boxes: by corners, in boxes * 2^dimensions steps. Few boxes: by pairs. An overlap exists if any element is
    # missing, since the totals agree.
    if len(boxes) > 1 << len(axes):
        return _find_by_corners(shape, boxes, axes)
    pairs = ((tuple(map(max, a.offsets, b.offsets)), a, b) for a, b in combinations(boxes, 2))
    return next((first for first, a, b in pairs if first in a and first in b), None)


def _find_by_corners(shape: Sequence[int], boxes: Sequence[TensorBox], axes: Sequence[int]) -> tuple[int, ...] | None:
    """Return the first element that is not in exactly one box.

    A box adds 1 to the count of elements from its first corner to its last one. The counts follow from the signed
    corners of all boxes; they are 1 everywhere if and only if these add up to the corners of the full tensor.
    """
    corners = Counter[tuple[int, ...]]()
    for box, sign in [(TensorBox((0,) * len(shape), tuple(shape)), -1), *((box, 1) for box in boxes)]:
        for far in product((False, True), repeat=len(axes)):
            corner = tuple(box.offsets[a] + box.sizes[a] * end for a, end in zip(axes, far, strict=True))
            corners[corner] += -sign if sum(far) % 2 else sign
    wrong = min((corner for corner, count in corners.items() if count), default=None)
    if wrong is None:
        return None
    place = dict(zip(axes, wrong, strict=True))
    return tuple(place.get(axis, 0) for axis in range(len(shape)))
