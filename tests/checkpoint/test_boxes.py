"""A range of a tensor's elements as boxes: each element once, in order, with no more boxes than needed."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from npuzero.checkpoint.layout.boxes import TensorBox, boxes_of, find_coverage_error

SHAPES = st.lists(st.integers(0, 5), max_size=4).map(tuple)


@given(SHAPES, st.data(), st.none() | st.integers(1, 40))
def test_boxes_are_the_range(shape: tuple[int, ...], data: st.DataObject, limit: int | None) -> None:
    numel = math.prod(shape)
    begin = data.draw(st.integers(0, numel))
    end = data.draw(st.integers(begin, numel))
    whole = torch.arange(numel).view(shape)
    found = [torch.empty(0, dtype=torch.int64)]
    boxes = boxes_of(shape, begin, end, limit)
    for box in boxes:
        part = whole[tuple(slice(o, o + n) for o, n in zip(box.offsets, box.sizes, strict=True))]
        assert part.shape == box.sizes and part.is_contiguous() and part.numel() == box.numel > 0
        assert limit is None or box.numel <= limit
        found.append(part.reshape(-1))
    assert torch.equal(torch.cat(found), torch.arange(begin, end))
    if limit is None:
        assert len(boxes) <= max(1, 2 * len(shape) - 1)


def test_whole_rows_are_one_box() -> None:
    assert [box.sizes for box in boxes_of((8, 3, 2), 6, 42)] == [(6, 3, 2)]
    assert [(box.offsets, box.sizes) for box in boxes_of((4, 3), 2, 10)] == [
        ((0, 2), (1, 1)),
        ((1, 0), (2, 3)),
        ((3, 0), (1, 1)),
    ]


@given(SHAPES, st.data())
def test_an_element_that_is_not_in_one_box(shape: tuple[int, ...], data: st.DataObject) -> None:
    """Compare the boxes of a division, some of them moved, with a count of every element."""
    numel = math.prod(shape)
    cuts = sorted(data.draw(st.lists(st.integers(0, numel), max_size=4)))
    boxes = [box for a, b in zip([0, *cuts], [*cuts, numel], strict=True) for box in boxes_of(shape, a, b)]
    moved = []
    for box in boxes:
        offsets = tuple(data.draw(st.integers(0, s - n)) for s, n in zip(shape, box.sizes, strict=True))
        moved.append(TensorBox(offsets, box.sizes) if data.draw(st.integers(0, 3)) == 0 else box)
    counts = torch.zeros(shape, dtype=torch.int64)
    for box in moved:
        counts[tuple(slice(o, o + n) for o, n in zip(box.offsets, box.sizes, strict=True))] += 1
    place = find_coverage_error(shape, moved)
    assert (counts == 1).all() if place is None else counts[place] != 1


def test_parts_beyond_counting_are_refused() -> None:
    with pytest.raises(ValueError, match=r"8192 parts .* cut along 13 dimensions"):
        find_coverage_error((2,) * 13, [TensorBox((0,) * 13, (1,) * 13)] * 8192)
