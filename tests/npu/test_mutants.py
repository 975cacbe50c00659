"""Kernels and tilings with one mistake each, and the check that must find it: the emulator's own test.

A mutant is a replacement in a source of csrc/npu; the changed kernel is compiled and exercised like the right one.
"""

from __future__ import annotations

import re

import pytest

from npu import exercise
from npu.conftest import Install
from npu.emulated import ROOT, Emulator, build_emulated_kernels
from npu.mutants.mutant import KernelMutant
from npu.mutants.table import ALL, MEANINGS, MUTANTS
from npu.test_kernels import find_kernel_fault

CASES = [
    pytest.param(op, mutant, id=mutant.name, marks=() if mutant.quick else pytest.mark.slow)
    for op, mutants in ALL.items()
    for mutant in mutants
]


@pytest.mark.parametrize(("op", "mutant"), CASES)
def test_is_killed_by_the_check_that_is_meant_for_it(op: str, mutant: KernelMutant, install: Install) -> None:
    path = ROOT / "csrc" / "npu" / mutant.file
    text = path.read_text()
    assert text.count(mutant.old) == 1, f"{mutant.file} has {text.count(mutant.old)} of: {mutant.old}"
    emulated = install(Emulator(build_emulated_kernels(op, {path: text.replace(mutant.old, mutant.new)})))
    emulated.schedules = (0,)
    assert find_kernel_fault(exercise.ALL[op]) == mutant.check


def test_there_are_mutants_of_every_kernel() -> None:
    assert sum(map(len, MUTANTS.values())) >= 25
    assert {op for op, mutants in MUTANTS.items() if mutants} == set(exercise.ALL)
    names = [mutant.name for mutants in ALL.values() for mutant in mutants]
    assert len(set(names)) == len(names)
    assert all(len(kind) >= 2 and any(mutant.quick for mutant in kind) for kind in MEANINGS.values())
    lines = (ROOT / "docs" / "npu.md").read_text(encoding="utf-8").splitlines()
    told = [re.match(r"\| (\w+)(?:[^|]*\|){4} (\d+)[^|]*\|[^|]*\| no \|$", line) for line in lines]
    assert {row[1]: int(row[2]) for row in told if row} == {op: len(mutants) for op, mutants in ALL.items()}
