"""Bad input: every row of the table gives a typed error that says expected, got and what to do, on every rank, soon."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest

from faults.bad_inputs import CASES, Case
from faults.fault_ranks import Provoker, Seen

#: Seconds until the last rank has its error; far more than it takes, far less than a collective waits.
SOON_S = 8.0


# What is not mended yet: a pattern of names, and what happens instead.
PENDING: dict[str, str] = {
    "axes are None|placement is text": "TypeError or AttributeError of Plan.__post_init__",
    r"(to bfloat16|half) after zero\(\), zero[012]$": "torch's RuntimeError on the marker's dtype",
    r"(to meta|to_empty|p\.data.*) after zero\(\), zero[012]$": "nothing: the new data is ignored",
    r"another parameter after zero\(\)": "nothing: the new parameter is neither reduced nor trained",
    r"p\.grad = ... .*after zero\(\)|p\.grad = ... after": "nothing: the gradient is ignored",
    "(pickle|torch.save) of a cut model, zero0": "TypeError: cannot pickle 'weakref.ReferenceType' object",
    "optimizer over a deleted model": "nothing: the parameters' hooks keep the engine alive",
    "ZeroOptimizer, |^lr (-1|nan|is)|beta|^eps|^weight_decay|^unknown keyword": "torch's own error, or none",
    "group lr -1|no parameters|parameters are a (module|tensor)|parameter twice": "torch's own error, or none",
    "sparse gradients": "torch's RuntimeError: reshape is not implemented for sparse tensors",
    r"optimizer's load_state_dict: (wrong shape of a vec|moment|step|no |SGD)": "KeyError, TypeError, or nothing",
    "a second step without gradients": "the gradients of the step before are applied once more",
    "a rank without a backward pass": "the rank takes its old gradients: wrong numbers, or a deadlock",
    "ZeroOptimizer over frozen": "KeyError in Engine.place",
}


def _rows() -> Iterator[Any]:
    for name in CASES:
        reason = next((reason for names, reason in PENDING.items() if re.search(names, name)), None)
        yield pytest.param(name, marks=pytest.mark.xfail(reason=reason, strict=True) if reason else ())


@pytest.fixture(scope="module")
def provoker() -> Iterator[Provoker]:
    made = Provoker()
    yield made
    made.close()


@pytest.mark.parametrize("name", list(_rows()))
def test_bad_input(name: str, provoker: Provoker) -> None:
    for rank, seen in enumerate(provoker.provoke(name)):
        check(CASES[name], seen, f"rank {rank}")


def check(case: Case, seen: Seen, who: str) -> None:
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
