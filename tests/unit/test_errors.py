"""Errors say expected, got and what to do; the parts are fields; they survive a trip between processes."""

from __future__ import annotations

import pickle

import pytest

from npuzero import errors

KINDS = {
    errors.ConfigError: ValueError,
    errors.ContractError: ValueError,
    errors.KernelUnavailable: RuntimeError,
    errors.CoreMissing: ImportError,
    errors.PackageMissing: ImportError,
    errors.StateError: RuntimeError,
    errors.NonFiniteError: FloatingPointError,
    errors.OutOfSpace: MemoryError,
    errors.CollectiveError: RuntimeError,
    errors.StorageError: OSError,
    errors.BenchmarkError: RuntimeError,
    errors.CheckpointError: RuntimeError,
}


def test_the_tree_is_complete():
    assert set(errors.NpuZeroError.__subclasses__()) == set(KINDS)


@pytest.mark.parametrize("kind", KINDS)
def test_each_kind_is_also_the_builtin_that_people_catch(kind):
    assert issubclass(kind, KINDS[kind]) and issubclass(kind, errors.NpuZeroError)


@pytest.mark.parametrize("kind", [errors.NpuZeroError, *KINDS])
def test_text_and_fields(kind):
    error = kind("flat_adam: grad", expected="f32", got="f64", do="Cast it.", index=3)
    assert str(error) == "flat_adam: grad: expected f32; got f64. Cast it."
    assert (error.subject, error.expected, error.got, error.do) == ("flat_adam: grad", "f32", "f64", "Cast it.")
    assert error.facts == {"index": 3}


@pytest.mark.parametrize(
    ("got", "text"), [("it failed.", "got it failed. Mend it."), ("1, 2, ...", "got 1, 2, .... Mend it.")]
)
def test_a_clause_that_ends_with_a_full_stop_gets_no_other(got, text):
    error = errors.StateError("a save", expected="a file.", got=got, do="Mend it.")
    assert str(error) == f"a save: expected a file; {text}"
    assert error.got == got


@pytest.mark.parametrize("kind", [errors.NpuZeroError, *KINDS])
def test_pickling_keeps_everything(kind):
    error = kind("world", expected="2", got="3", do="Start again.", rank=1)
    again = pickle.loads(pickle.dumps(error))
    assert type(again) is kind and str(again) == str(error)
    assert again.facts == {"rank": 1} and again.do == "Start again."
