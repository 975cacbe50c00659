"""Compare the frozen parameters of ranks, to explain a deadlock.

A rank that froze the first layers of a model leaves backward early. Remaining ranks wait for it in a collective, and
the places of the ranks do not show the reason.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import NamedTuple

#: Names of parameters in an error.
_NAMED = 5


class FrozenParameters(NamedTuple):
    """Record the parameters of a model that one rank has frozen since the model was sharded.

    Attributes:
        model: a digest of the parameters that the optimizer trains; equal on ranks that hold one model.
        total: number of frozen parameters.
        names: the first of their names.
    """

    model: str
    total: int
    names: tuple[str, ...]

    def text(self) -> str:
        """Return the names as text."""
        more = f" and {self.total - len(self.names)} more" if self.total > len(self.names) else ""
        return (", ".join(self.names) + more) or "none"


def record_frozen(model: str, names: Sequence[str]) -> FrozenParameters:
    """Return the record of ``names``, which keeps the first few."""
    return FrozenParameters(model, len(names), tuple(names[:_NAMED]))


def describe_frozen_difference(frozen: Mapping[int, Sequence[FrozenParameters]]) -> str:
    """Return the frozen parameters by rank, if ranks of one model have frozen different ones; else ""."""
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
