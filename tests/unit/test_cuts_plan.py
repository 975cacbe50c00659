"""The arithmetic of cuts: parts of a tensor, by themselves, put together, and as blocks of its elements."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import npuzero
from npuzero.plan import Cut, TensorPortion


@st.composite
def draw_cuts(draw: st.DrawFn) -> tuple[Cut, torch.Size, int]:
    """A cut, a shape that it fits, and a number of ranks that divide it."""
    n = draw(st.integers(1, 4))
    spans = tuple(n * k for k in draw(st.lists(st.integers(1, 3), max_size=3)))
    size = sum(spans) if spans else n * draw(st.integers(0, 3))
    before = draw(st.lists(st.integers(1, 4), max_size=2))
    after = draw(st.lists(st.integers(1, 4), max_size=2))
    return Cut("tensor", len(before), spans), torch.Size([*before, size, *after]), n


def arange_of_shape(shape: torch.Size) -> torch.Tensor:
    return torch.arange(shape.numel()).view(shape)


def cut_by_hand(cut: Cut, whole: torch.Tensor, n: int, index: int) -> torch.Tensor:
    spans = whole.split(list(cut.spans or (whole.shape[cut.dim],)), cut.dim)
    return torch.cat([span.chunk(n, cut.dim)[index] for span in spans if span.numel()] or [whole], cut.dim)


class TestParts:
    @settings(max_examples=60, deadline=None)
    @given(draw_cuts())
    def test_a_part_has_its_part_of_each_span_and_all_parts_make_the_whole(self, case):
        cut, shape, n = case
        whole = arange_of_shape(shape)
        again = torch.full_like(whole, -1)
        for index in range(n):
            part = cut.take(whole, n, index)
            assert part.shape == cut.shape(shape, n)
            assert torch.equal(part, cut_by_hand(cut, whole, n, index))
            cut.put(again, n, index, part)
        assert torch.equal(again, whole)

    def test_packed_queries_keys_and_values(self):
        cut = Cut("tensor", 0, (8, 4, 4))
        assert cut.shape((16, 5), 2) == (8, 5)
        assert cut.pieces((16, 5), 2, 0) == [(0, 4), (8, 10), (12, 14)]
        assert cut.pieces((16, 5), 2, 1) == [(4, 8), (10, 12), (14, 16)]

    def test_one_rank_has_all_of_it(self):
        assert Cut("tensor", 0, (8, 4, 4)).pieces((16,), 1, 0) == [(0, 16)]

    def test_several_axes_count_as_one(self):
        assert Cut(("node", "local"), 0).axes == ("node", "local")
        assert Cut("tensor", 0).axes == ("tensor",)


class TestBlocks:
    @settings(max_examples=100, deadline=None)
    @given(draw_cuts(), st.integers(1, 40))
    def test_blocks_are_the_whole_in_order_and_each_part_in_its_own(self, case, limit):
        cut, shape, n = case
        whole = arange_of_shape(shape).reshape(-1)
        parts = [TensorPortion(cut, shape, n, index) for index in range(n)]
        taken = [[] for _ in parts]
        again = torch.full_like(whole, -1)
        at = 0
        for block in parts[0].blocks(limit):
            assert block.begin == at and 0 < block.end - block.begin <= limit
            at = block.end
            values = whole[block.begin : block.end]
            for part, its in zip(parts, taken, strict=True):
                share = part.out_of(block, values)
                begin, end = part.share_of(block)
                assert (begin, end) == (begin, begin + share.numel())
                assert torch.equal(share, part.take(whole.view(shape)).reshape(-1)[begin:end])
                part.into(block, again[block.begin : block.end], share)
                its.append(share)
        assert at == whole.numel()
        assert torch.equal(again, whole)
        for part, its in zip(parts, taken, strict=True):
            assert sum(share.numel() for share in its) == math.prod(part.shape)

    def test_rows_of_the_first_dimension_are_ranges_of_one_part(self):
        blocks = [*TensorPortion(Cut("tensor", 0), torch.Size([8, 4]), 2, 0).blocks(100)]
        assert [(block.begin, block.end, block.owner, block.start) for block in blocks] == [
            (0, 16, 0, 0),
            (16, 32, 1, 0),
        ]

    def test_columns_come_by_rows_of_all_parts(self):
        blocks = [*TensorPortion(Cut("tensor", 1), torch.Size([8, 4]), 2, 0).blocks(20)]
        assert [(block.begin, block.end, block.owner, block.start) for block in blocks] == [
            (0, 20, None, 0),
            (20, 32, None, 10),
        ]


class TestCutErrors:
    def test_a_dimension_that_does_not_divide_names_what_would(self):
        with pytest.raises(npuzero.ConfigError) as raised:
            Cut("tensor", 0).check("mlp.up.weight", (12, 5), 5)
        for word in ("mlp.up.weight", "tensor", "dimension 0", "5 ranks", "1, 2, 3, 4, 6, 12"):
            assert word in str(raised.value)

    def test_a_span_that_does_not_divide_names_what_divides_all_of_them(self):
        with pytest.raises(npuzero.ConfigError, match="1, 2"):
            Cut("tensor", 0, (8, 2, 2)).check("qkv.weight", (12, 5), 4)

    @pytest.mark.parametrize("cut", [Cut("tensor", 2), Cut("tensor", 0, (8, 2)), Cut("tensor", 1, (8, 2, 2))])
    def test_a_cut_that_is_none_of_the_shape(self, cut):
        with pytest.raises(npuzero.ConfigError, match=r"qkv\.weight"):
            cut.check("qkv.weight", (12, 5), 1)

    @pytest.mark.parametrize(
        "given", [("", 0), ("tensor", -1), ("tensor", True), ("tensor", 0, (4, 0)), ("tensor", 0, [4])]
    )
    def test_what_is_no_cut(self, given):
        with pytest.raises(npuzero.ConfigError, match="positive sizes"):
            Cut(*given)
