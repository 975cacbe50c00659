"""Choose the blocks of each pipeline stage: as given, or so that the slowest stage is fastest. Pure data."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from npuzero.errors import ConfigError, did_you_mean

#: The number of blocks of each stage, or the name of each stage's first block.
Split = Sequence[int] | Sequence[str]


@dataclass(frozen=True)
class BlockCost:
    """Describe a block of a model.

    Attributes:
        name: its path in the model.
        cost: elements of the parameters that multiply activations, two operations per token each; embeddings are looked
            up and cost nothing.
        numel: elements of all its parameters.
    """

    name: str
    cost: int
    numel: int


def split_blocks(blocks: Sequence[BlockCost], stages: int, split: Split | None) -> tuple[tuple[str, ...], ...]:
    """Return the names of each stage's blocks.

    Args:
        split: None: minimize the largest cost of a stage; among equal splits, the largest number of parameters.

    Raises:
        ConfigError: there are more stages than blocks; a stage has no parameters; ``split`` does not match these
            blocks.
    """
    if stages > len(blocks):
        raise ConfigError(
            "pipeline stages",
            expected=f"at most as many as there are blocks: {len(blocks)}",
            got=f"{stages}",
            do="Take fewer pipeline ranks or chunks, or name smaller blocks.",
        )
    counts = _balance_blocks(blocks, stages) if split is None else _parse_split(blocks, stages, split)
    ends = list(accumulate(counts))
    parts = [blocks[end - count : end] for count, end in zip(counts, ends, strict=True)]
    for stage, part in enumerate(parts):
        if not any(block.numel for block in part):
            raise ConfigError(
                f"split: stage {stage}",
                expected="parameters in every stage",
                got=f"none in {', '.join(repr(block.name) for block in part)}",
                do="Give it a block with parameters as well, or take fewer stages.",
                stage=stage,
            )
    return tuple(tuple(block.name for block in part) for part in parts)


def _balance_blocks(blocks: Sequence[BlockCost], stages: int) -> list[int]:
    numels = [block.numel for block in blocks]
    if sum(map(bool, numels)) < stages:
        raise ConfigError(
            "pipeline stages",
            expected=f"at most as many as there are blocks with parameters: {sum(map(bool, numels))}",
            got=f"{stages}",
            do="Take fewer pipeline ranks or chunks, or name smaller blocks.",
        )
    costs = [block.cost for block in blocks]
    bound, _ = _minimize_heaviest(costs, numels, costs, None, stages)
    return _minimize_heaviest(numels, numels, costs, bound, stages)[1]


def _minimize_heaviest(
    weights: list[int], numels: list[int], costs: list[int], bound: int | None, stages: int
) -> tuple[int, list[int]]:
    """Return the smallest possible weight of the heaviest of ``stages`` parts, and the number of blocks in each part.

    Dynamic programming over the first n blocks in k parts. Each part has parameters and costs at most ``bound``. Exact,
    in stages * blocks^2 steps.
    """
    sums, held, spent = ([0, *accumulate(each)] for each in (weights, numels, costs))
    best: dict[int, tuple[int, list[int]]] = {0: (0, [])}
    for _ in range(stages):
        longer: dict[int, tuple[int, list[int]]] = {}
        for end in range(1, len(weights) + 1):
            found = [
                (max(heaviest, sums[end] - sums[begin]), [*counts, end - begin])
                for begin, (heaviest, counts) in best.items()
                if begin < end and held[end] > held[begin] and (bound is None or spent[end] - spent[begin] <= bound)
            ]
            if found:
                longer[end] = min(found)
        best = longer
    return best[len(weights)]


def _parse_split(blocks: Sequence[BlockCost], stages: int, split: Split) -> list[int]:
    # A bool is an int to isinstance, so kinds are compared by type.
    kinds = {type(each) for each in split} if isinstance(split, (list, tuple)) else {type(split)}
    if not isinstance(split, (list, tuple)) or not (kinds <= {int} or kinds <= {str}):
        raise ConfigError(
            "split",
            expected="a list of numbers of blocks, or a list of names of first blocks",
            got=repr(split),
            do="Give [2, 2], or ['0', '2'].",
        )
    if len(split) != stages:
        raise ConfigError(
            "split",
            expected=f"an entry for each of {stages} stages",
            got=f"{len(split)}",
            do="Give the number of blocks, or the name of the first block, of every stage, in order.",
        )
    counts = _count_blocks(blocks, [str(name) for name in split]) if kinds == {str} else [int(n) for n in split]
    if min(counts) < 1 or sum(counts) != len(blocks):
        raise ConfigError(
            "split",
            expected=f"at least a block in each stage, and {len(blocks)} in all",
            got=f"{counts}, {sum(counts)} in all",
            do=f"The blocks are {blocks[0].name!r} to {blocks[-1].name!r}.",
        )
    return counts


def _count_blocks(blocks: Sequence[BlockCost], firsts: list[str]) -> list[int]:
    """Return the number of blocks from each of ``firsts`` to the next."""
    places = {block.name: place for place, block in enumerate(blocks)}
    for name in firsts:
        if name not in places:
            raise ConfigError(
                "split",
                expected=f"names of blocks, {blocks[0].name!r} to {blocks[-1].name!r}",
                got=repr(name),
                do=did_you_mean(name, list(places), "Name the first block of each stage."),
            )
    begins = [places[name] for name in firsts]
    if begins[0] != 0 or begins != sorted(set(begins)):
        raise ConfigError(
            "split",
            expected=f"the first block of each stage, in order, from {blocks[0].name!r} on",
            got=", ".join(map(repr, firsts)),
            do="Name each stage's first block once.",
        )
    return [end - begin for begin, end in zip(begins, [*begins[1:], len(blocks)], strict=True)]
