"""Compare which parameters the ranks have frozen, where they wait for each other in vain.

A rank that freezes the first layers of a model leaves backward earlier than the others, which then wait for it in a
collective of their own: where the ranks are does not tell why.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import NamedTuple

#: Names of parameters in an error.
_NAMED = 5


class FrozenParameters(NamedTuple):
    """Record what one rank has frozen of a model since it was sharded.

    Attributes:
        model: a digest of the parameters that the optimizer trains, which is the same on ranks that hold one model.
        total: the number of them that are frozen.
        names: the first of these.
    """

    model: str
    total: int
    names: tuple[str, ...]

    def text(self) -> str:
        """Return it in words."""
        more = f" and {self.total - len(self.names)} more" if self.total > len(self.names) else ""
        return (", ".join(self.names) + more) or "none"


def record_frozen(model: str, names: Sequence[str]) -> FrozenParameters:
    """Return the record of ``names``, of which it keeps the first."""
    return FrozenParameters(model, len(names), tuple(names[:_NAMED]))


def describe_frozen_difference(frozen: Mapping[int, Sequence[FrozenParameters]]) -> str:
    """Return by rank what is frozen, where ranks of one model have frozen different parameters; "" elsewhere."""
    ranks_of: dict[str, dict[FrozenParameters, list[int]]] = defaultdict(lambda: defaultdict(list))
    for rank, records in frozen.items():
        for record in records:
            ranks_of[record.model][record].append(rank)
    return "; ".join(
        f"{record.text()} on rank {', '.join(map(str, ranks[:_NAMED]))}" + ", ..." * (len(ranks) > _NAMED)
        for records in ranks_of.values()
        if len(records) > 1
        for record, ranks in records.items()
    )
