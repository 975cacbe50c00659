"""A few rows that hold every pair of values of every two factors: some row tests each pairwise interaction.

Greedy and deterministic: each row begins with a pair that no row has yet, and takes for every further factor the
value that makes most new pairs; among equals the value that was taken least.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

Row = dict[str, Any]


def covering_rows(factors: Mapping[str, Sequence[Any]], possible: Callable[[Row], bool]) -> list[Row]:
    """Return rows with a value of each of ``factors``.

    Args:
        possible: whether values of two factors go together. Some value of each factor must go with all others.
    """
    cells = [(name, value) for name, values in factors.items() for value in values]  # known by their numbers
    members = {name: [i for i, cell in enumerate(cells) if cell[0] == name] for name in factors}
    pairs = [
        pair
        for one, other in itertools.combinations(members.values(), 2)
        for pair in itertools.product(one, other)
        if possible(dict(cells[i] for i in pair))
    ]
    together = {*pairs, *((b, a) for a, b in pairs)}
    missing = dict.fromkeys(pairs)
    taken: Counter[int] = Counter()
    rows = []
    while missing:
        row = list(next(iter(missing)))
        for name in (name for name in factors if name not in {cells[i][0] for i in row}):
            fitting = [i for i in members[name] if all((i, other) in together for other in row)]
            new = {i: sum((min(i, other), max(i, other)) in missing for other in row) for i in fitting}
            row.append(max(fitting, key=lambda i: (new[i], -taken[i])))
        for pair in itertools.combinations(sorted(row), 2):
            missing.pop(pair, None)
        taken.update(row)
        rows.append({name: value for i in sorted(row) for name, value in [cells[i]]})
    return rows
