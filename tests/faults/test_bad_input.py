"""Bad input: every row of the table gives a typed error with expected, got and a remedy, on every rank, soon."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest

from faults.bad_inputs.case import BadInput
from faults.bad_inputs.table import CASES
from faults.fault_ranks import FaultProvoker, SeenError

#: Seconds until the last rank has its error: far more than needed, far less than a collective's timeout.
SOON_S = 8.0


@pytest.fixture(scope="module")
def provoker() -> Iterator[FaultProvoker]:
    made = FaultProvoker()
    yield made
    made.close()


@pytest.mark.parametrize("name", list(CASES))
def test_bad_input(name: str, provoker: FaultProvoker) -> None:
    for rank, seen in enumerate(provoker.provoke(name)):
        check_seen_error(CASES[name], seen, f"rank {rank}")


def check_seen_error(case: BadInput, seen: SeenError, who: str) -> None:
    assert seen.after_s < SOON_S
    if case.error is None:
        assert not seen.kind, f"{who}: {seen.trace}"
        return
    assert seen.kind == case.error.__name__, f"{who}: {seen.kind or 'nothing'} raised\n{seen.trace}"
    builtin = ValueError if issubclass(case.error, ValueError) else RuntimeError
    assert {"NpuZeroError", builtin.__name__} < set(seen.bases)
    for part in seen.parts:
        assert part.strip(), f"{who}: one of expected, got, do is empty: {seen.parts}"
        assert part in seen.text
    for words in case.says:
        assert re.search(words, seen.text, re.IGNORECASE | re.DOTALL), f"{who}: {words!r} is not in: {seen.text}"
