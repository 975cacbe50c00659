from __future__ import annotations

import itertools

import pytest
import torch

from npuzero import ops
from ops import grid

F32, BF16, F16 = grid.FLOATS
PAIRS = list(itertools.product(grid.FLOATS, repeat=2))


def offsets_with_gaps(sizes: tuple[int, ...], offset: int) -> tuple[list[int], int]:
    """Offsets with gaps of one to three elements between neighbours, and the wire's length."""
    offsets, end = [], offset
    for i, size in enumerate(sizes):
        offsets.append(end)
        end += size + 1 + i % 3
    return offsets, end + 2


@pytest.mark.parametrize("accumulate", [False, True])
@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize(("source", "target"), PAIRS)
def test_equals_reference_on_the_grid(
    isa: str, source: torch.dtype, target: torch.dtype, scaled: bool, accumulate: bool
) -> None:
    for offset in grid.OFFSETS:
        for sizes in (grid.SMALL, (grid.LARGE // 10, 5, grid.LARGE // 20)):
            offsets, length = offsets_with_gaps(sizes, offset)
            tensors = [grid.GuardedBuffer.around(grid.grid_values(n, source), offset).inner for n in sizes]
            options = {"scale": torch.tensor([0.37]) if scaled else None, "accumulate": accumulate}
            wire = grid.grid_values(length, target)
            actual, expected = grid.GuardedBuffer.around(wire, offset), wire.clone()
            ops.pack(tensors, offsets, actual.inner, **options)
            grid.with_reference(lambda t=tensors, o=offsets, w=expected, kw=options: ops.pack(t, o, w, **kw))
            grid.assert_same(actual.inner, expected, f"pack {sizes}+{offset}")
            actual.assert_guards()

            wire = grid.grid_values(length, source)
            start = [grid.grid_values(n, target) for n in sizes]
            actuals = [grid.GuardedBuffer.around(content, offset) for content in start]
            expecteds = [content.clone() for content in start]
            ops.unpack(wire, [guarded.inner for guarded in actuals], offsets, **options)
            grid.with_reference(lambda w=wire, t=expecteds, o=offsets, kw=options: ops.unpack(w, t, o, **kw))
            for guarded, content in zip(actuals, expecteds, strict=True):
                grid.assert_same(guarded.inner, content, f"unpack {sizes}+{offset}")
                guarded.assert_guards()


def test_copies_of_bits_keep_every_pattern(isa: str) -> None:
    every = torch.arange(-(2**15), 2**15).to(torch.int16)
    for dtype in (BF16, F16):
        wire = torch.zeros(2**16, dtype=dtype)
        ops.pack([every.view(dtype)], [0], wire)
        assert torch.equal(wire.view(torch.int16), every)


def test_many_tensors_of_mixed_dtype_and_shape_in_any_order() -> None:
    tensors = [torch.randn(7, i % 50, 3).to(grid.FLOATS[i % 3]) for i in range(450)]
    offsets, length = offsets_with_gaps(tuple(t.numel() for t in tensors), 0)
    order = torch.randperm(450).tolist()
    tensors, offsets = [tensors[i] for i in order], [offsets[i] for i in order]
    wire = torch.full((length,), 9.0)
    ops.pack(tensors, offsets, wire, scale=2.0)
    for tensor, offset in zip(tensors, offsets, strict=True):
        assert torch.equal(wire[offset : offset + tensor.numel()], tensor.flatten().float() * 2)
    assert (wire == 9.0).sum() >= length - sum(t.numel() for t in tensors)
    back = [torch.empty_like(tensor) for tensor in tensors]
    ops.unpack(wire, back, offsets, scale=0.5)
    assert all(torch.equal(a, b) for a, b in zip(back, tensors, strict=True))


def test_there_may_be_nothing_to_do() -> None:
    wire = torch.ones(3)
    ops.pack([], [], wire)
    ops.unpack(wire, [], [])
    ops.pack([torch.empty(0), torch.empty(0, 4), torch.tensor(5.0)], [3, 0, 1], wire)
    assert wire.tolist() == [1.0, 5.0, 1.0]
    ops.pack([torch.empty(0)], [0], torch.empty(0))


def test_result_does_not_depend_on_threads() -> None:
    tensors = [torch.randn(n) for n in (5, 300_000, 1, 80_001)]
    offsets, length = offsets_with_gaps((5, 300_000, 1, 80_001), 0)
    results = []
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        results.append(torch.zeros(length, dtype=BF16))
        ops.pack(tensors, offsets, results[-1], scale=1.7)
    assert torch.equal(results[0], results[1]) and torch.equal(results[0], results[2])


def _released_view() -> torch.Tensor:
    tensor = torch.zeros(8)
    view = tensor[2:6]
    tensor.untyped_storage().resize_(0)
    return view


_SHARED = torch.zeros(20)
_A, _W = torch.zeros(4), torch.zeros(10)

BAD = {
    "no tensor": (lambda: ops.pack([[1.0]], [0], _W), "pack: tensors[0]"),
    "integers": (lambda: ops.pack([_A.int()], [0], _W), "pack: tensors[0]"),
    "float64": (lambda: ops.unpack(_W, [_A.double()], [0]), "unpack: tensors[0]"),
    "not contiguous": (lambda: ops.pack([torch.zeros(4, 4).T], [0], torch.zeros(16)), "pack: tensors[0]"),
    "other device": (lambda: ops.pack([_A.to("meta")], [0], _W), "pack: tensors[0]"),
    "released": (lambda: ops.pack([_released_view()], [0], _W), "pack: tensors[0]"),
    "float64 wire": (lambda: ops.pack([_A], [0], _W.double()), "pack: wire"),
    "wire of two dimensions": (lambda: ops.pack([_A], [0], _W.view(2, 5)), "pack: wire"),
    "fewer offsets": (lambda: ops.pack([_A, _A], [0], _W), "pack: offsets"),
    "past the end": (lambda: ops.pack([_A], [7], _W), "pack: offsets[0]"),
    "before the start": (lambda: ops.unpack(_W, [_A], [-1]), "unpack: offsets[0]"),
    "fractional offset": (lambda: ops.pack([_A], [1.0], _W), "pack: offsets[0]"),
    "overlapping ranges": (lambda: ops.pack([_A, torch.zeros(3)], [4, 2], _W), "pack: offsets[0]"),
    "inside another range": (lambda: ops.pack([torch.zeros(9), _A[:1]], [0, 5], _W), "pack: offsets[1]"),
    "a view of the wire": (lambda: ops.pack([_SHARED[:4]], [4], _SHARED), "pack: tensors[0]"),
    "targets overlap": (lambda: ops.unpack(_W, [_SHARED[:4], _SHARED[3:6]], [0, 4]), "unpack: tensors[1]"),
    "scale of two": (lambda: ops.pack([_A], [0], _W, scale=torch.ones(2)), "pack: scale"),
    "scale in bf16": (lambda: ops.pack([_A], [0], _W, scale=torch.ones(1).bfloat16()), "pack: scale"),
    "scale of text": (lambda: ops.pack([_A], [0], _W, scale="2"), "pack: scale"),
    "scale in the wire": (lambda: ops.pack([_A], [0], _SHARED, scale=_SHARED[19:]), "pack: scale"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_arguments_are_refused(name: str) -> None:
    call, subject = BAD[name]
    grid.assert_refused(call, subject)
