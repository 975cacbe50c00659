"""Mistakes that tests must notice: the list is true of the code, and each is noticed."""

from __future__ import annotations

from collections import Counter

import pytest

from .mutant import ROOT, PackageMutant, kill_mutant
from .table import MUTANTS

#: What `make test` runs, of little work: it says that the runner tells.
QUICK = "the axes of the mesh are the wrong way round"


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.breaks)
def test_what_it_changes_is_there_once(mutant: PackageMutant) -> None:
    """In its file; and the tests that shall notice exist, quick ones where it says so."""
    assert mutant.source.read_text().count(mutant.old) == 1
    assert mutant.old != mutant.new and mutant.tests
    for test in mutant.tests:
        file, _, function = test.partition("::")
        name = function.partition("[")[0]
        before, found, _ = (ROOT / "tests" / file).read_text().partition(f"\ndef {name}")
        assert found, test
        assert mutant.slow or not name or "@pytest.mark.slow" not in before.rpartition("\n\n\n")[2], test


def test_each_is_listed_once() -> None:
    assert max(Counter(mutant.breaks for mutant in MUTANTS).values()) == 1
    assert max(Counter((mutant.file, mutant.old, mutant.new) for mutant in MUTANTS).values()) == 1


@pytest.mark.world
@pytest.mark.parametrize(
    "mutant",
    [pytest.param(mutant, marks=() if mutant.breaks == QUICK else pytest.mark.slow) for mutant in MUTANTS],
    ids=lambda mutant: mutant.breaks,
)
def test_is_killed(mutant: PackageMutant) -> None:
    assert kill_mutant(mutant), f"alive: {mutant.breaks}"
