"""Cuts of rows that ranks do not divide: parts are equal in size all the same, and all of them make up the tensor."""

from __future__ import annotations

import pytest
import torch

from npuzero import ConfigError
from npuzero.plan import DATA, Cut, TensorPortion


@pytest.mark.parametrize(("rows", "n"), [(7, 3), (8, 3), (6, 3), (5, 4), (4, 4), (3, 1)])
def test_parts_are_equal_and_make_up_the_tensor(rows: int, n: int) -> None:
    whole, cut = torch.arange(1.0, 1 + 2 * rows).view(rows, 2), Cut(DATA, 0, uneven=True)
    cut.check("weight", whole.shape, n)
    pieces = [piece for index in range(n) for piece in cut.pieces(whole.shape, n, index)]
    assert [begin for begin, _ in pieces] == [0, *(end for _, end in pieces)][:-1] and pieces[-1][1] == rows
    sizes = [end - begin for begin, end in pieces]
    assert sizes == sorted(sizes, reverse=True) and sizes[0] - sizes[-1] <= 1
    again = torch.zeros_like(whole)
    for index in range(n):
        part = cut.take(whole, n, index)
        assert part.shape == cut.shape(whole.shape, n)
        assert not part[sizes[index] :].any()
        cut.put(again, n, index, part)
    assert again.equal(whole)
    for limit in (1, 3, 100):
        blocks = [*TensorPortion(cut, whole.shape, n, 0).blocks(limit)]
        assert [block.begin for block in blocks] == [0, *(block.end for block in blocks)][:-1]
        for block in blocks:
            part = cut.take(whole, n, block.owner).view(-1)
            assert part[block.start : block.start + block.end - block.begin].equal(
                whole.view(-1)[block.begin : block.end]
            )


def test_a_rank_without_a_row_is_refused() -> None:
    with pytest.raises(ConfigError, match="3 ranks all have a part of; got 2"):
        Cut(DATA, 0, uneven=True).check("weight", (2, 4), 3)


@pytest.mark.parametrize("given", [{"dim": 1}, {"dim": 0, "spans": (2, 3)}])
def test_only_rows_are_cut_unevenly(given: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match="cut"):
        Cut(DATA, uneven=True, **given)
