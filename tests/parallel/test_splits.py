"""The division of blocks into stages: the best of all partitions."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence

import pytest

from npuzero.parallel.pipeline_parallel.choose_splits import BlockCost, split_blocks


def best_split_cost(blocks: Sequence[BlockCost], stages: int) -> tuple[int, int]:
    """Return the smallest largest cost, and then the smallest largest number of parameters, of all partitions."""
    found = []
    for inner in itertools.combinations(range(1, len(blocks)), stages - 1):
        ends = [0, *inner, len(blocks)]
        parts = [blocks[a:b] for a, b in itertools.pairwise(ends)]
        if all(sum(block.numel for block in part) for part in parts):
            found.append(largest_part_cost(parts))
    return min(found)


def largest_part_cost(parts: Sequence[Sequence[BlockCost]]) -> tuple[int, int]:
    return max(sum(b.cost for b in part) for part in parts), max(sum(b.numel for b in part) for part in parts)


@pytest.mark.parametrize("seed", range(20))
def test_splits_are_the_best_of_all(seed: int) -> None:
    chance = random.Random(seed)
    blocks = [BlockCost(str(i), cost := chance.choice((0, 1, 2, 9)), cost + chance.choice((0, 1, 5))) for i in range(8)]
    stages = min(chance.randint(1, 5), sum(map(bool, (block.numel for block in blocks))))
    known = {block.name: block for block in blocks}
    parts = [[known[name] for name in part] for part in split_blocks(blocks, stages, None)]
    assert [block for part in parts for block in part] == blocks and len(parts) == stages
    assert largest_part_cost(parts) == best_split_cost(blocks, stages)


def test_every_stage_has_parameters() -> None:
    blocks = [BlockCost(str(i), cost, cost) for i, cost in enumerate((0, 9, 1, 1))]
    assert split_blocks(blocks, 3, None) == (("0", "1"), ("2",), ("3",)), "though the 9 alone would be as slow"
