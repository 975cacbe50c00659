"""THE TABLE of bad inputs: how to provoke each, the error that all ranks get, and its text."""

from __future__ import annotations

from itertools import chain

from . import clipping, collectives_and_ops, models, optimizers, parameters, passes, plans, scaler, settings, states
from .case import BadInput, BadInputTable

TABLES: tuple[BadInputTable, ...] = (
    plans.TABLE,
    scaler.TABLE,
    settings.TABLE,
    models.TABLE,
    clipping.TABLE,
    parameters.TABLE,
    passes.TABLE,
    optimizers.TABLE,
    states.TABLE,
    collectives_and_ops.TABLE,
)
CASES: dict[str, BadInput] = dict(chain.from_iterable(table.items() for table in TABLES))
assert len(CASES) == sum(map(len, TABLES)), "two rows have one name"
