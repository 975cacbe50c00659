"""Flat layouts: whatever the shapes, slots lie apart and aligned, and a deeper cut is a sub-range."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from npuzero.plan import SHARD_BYTES, START_ELEMENTS, MeshShape
from npuzero.shard.layout.flat_layout import FlatLayout, intersect_ranges

shapes = st.lists(st.lists(st.integers(0, 9), max_size=3).map(torch.Size), max_size=12)
dtypes = st.sampled_from([torch.float32, torch.bfloat16, torch.float16])
meshes = st.builds(MeshShape, st.integers(1, 4), st.integers(1, 4))


def layout_of_shapes(shapes: list[torch.Size], ranks: int, dtype: torch.dtype) -> FlatLayout:
    return FlatLayout.of([(f"p{i}", shape) for i, shape in enumerate(shapes)], ranks, dtype)


@given(shapes, meshes, dtypes)
def test_slots_and_gaps_cover_the_flat_once(shapes: list[torch.Size], mesh: MeshShape, dtype: torch.dtype) -> None:
    layout = layout_of_shapes(shapes, mesh.world, dtype)
    assert [slot.shape for slot in layout.slots] == shapes
    covered = torch.zeros(layout.numel, dtype=torch.int32)
    for slot in layout.slots:
        assert slot.begin % START_ELEMENTS == 0 and slot.end - slot.begin == slot.numel == slot.shape.numel()
        covered[slot.begin : slot.end] += 1
    for begin, end in layout.gaps:
        assert begin < end
        covered[begin:end] += 1
    assert bool((covered == 1).all())


@given(shapes, meshes, dtypes)
def test_shards_are_equal_and_aligned(shapes: list[torch.Size], mesh: MeshShape, dtype: torch.dtype) -> None:
    layout = layout_of_shapes(shapes, mesh.world, dtype)
    for count in {1, mesh.node, mesh.local, mesh.world}:
        shards = [layout.shard(i, count) for i in range(count)]
        assert [begin for begin, _ in shards] == [0, *(end for _, end in shards[:-1])] and shards[-1][1] == layout.numel
        assert len({end - begin for begin, end in shards}) == 1
        assert all(begin * dtype.itemsize % SHARD_BYTES == 0 for begin, _ in shards)


@given(shapes, meshes, dtypes)
def test_a_deeper_cut_is_a_sub_range(shapes: list[torch.Size], mesh: MeshShape, dtype: torch.dtype) -> None:
    layout = layout_of_shapes(shapes, mesh.world, dtype)
    for outer, inner in ((mesh.node, mesh.local), (mesh.local, mesh.node)):
        for i in range(outer):
            begin, end = layout.shard(i, outer)
            parts = [layout.shard(i * inner + j, outer * inner) for j in range(inner)]
            assert (parts[0][0], parts[-1][1]) == (begin, end)


@given(shapes, dtypes)
def test_padding_is_no_more_than_alignment_asks(shapes: list[torch.Size], dtype: torch.dtype) -> None:
    layout = layout_of_shapes(shapes, 8, dtype)
    longest = sum(shape.numel() for shape in shapes) + (START_ELEMENTS - 1) * len(shapes)
    assert layout.numel < longest + 8 * SHARD_BYTES // dtype.itemsize
    assert (layout.numel == 0) == all(shape.numel() == 0 for shape in shapes)


@given(*[st.tuples(st.integers(0, 20), st.integers(0, 20)).map(lambda pair: tuple(sorted(pair)))] * 2)
def test_overlap_is_the_common_part(a: tuple[int, int], b: tuple[int, int]) -> None:
    assert set(range(*intersect_ranges(a, b))) == set(range(*a)) & set(range(*b))
