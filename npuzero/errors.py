"""The error tree. Each error reports the expected value, the actual value, and a remedy.

The three parts are fields as well as text, so that a program can act on them::

    try:
        npuzero.zero(model, stage=4)
    except npuzero.ConfigError as error:
        print(error.expected, error.got, error.do, error.facts)
"""

from __future__ import annotations

import difflib
import functools
import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar, cast

_Callable = TypeVar("_Callable", bound=Callable[..., Any])


class NpuZeroError(Exception):
    """Represent every error that this package raises on purpose: the base class of the tree.

    Args:
        subject: what the error is about, e.g. ``"flat_adam: grad"``.
        expected: the value that would have been correct.
        got: the actual value.
        do: the remedy, as a sentence for the reader.
        facts: further values, stored in ``error.facts``.

    Example::

        try:
            npuzero.Plan.preset("zero4")
        except npuzero.NpuZeroError as error:
            print(error.expected, error.got, error.do)
    """

    def __init__(self, subject: str, *, expected: str, got: str, do: str, **facts: Any) -> None:
        super().__init__(f"{subject}: expected {_strip_full_stop(expected)}; got {_strip_full_stop(got)}. {do}")
        self.subject = subject
        self.expected = expected
        self.got = got
        self.do = do
        self.facts = facts

    def __reduce__(self) -> tuple[Any, ...]:
        # Errors travel between processes (multiprocessing, pytest-xdist): rebuild from the parts.
        return _rebuild_error, (type(self), self.subject, self.expected, self.got, self.do, self.facts)


def _strip_full_stop(text: str) -> str:
    """Return ``text`` without its final full stop, which the message adds: texts of other packages may have one."""
    return text if text.endswith("..") else text.removesuffix(".")


def _rebuild_error(
    kind: type[NpuZeroError], subject: str, expected: str, got: str, do: str, facts: dict[str, Any]
) -> NpuZeroError:
    return kind(subject, expected=expected, got=got, do=do, **facts)


class ConfigError(NpuZeroError, ValueError):
    """Refuse a setting, plan or model that cannot work, before any work is done."""


class _Refusal(ConfigError):
    """Refuse an argument with an error that is also of a third-party function's error type ``kind``."""

    kind: type[Exception] = ValueError
    __str__ = Exception.__str__  # a KeyError shows its argument as repr() does

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild_error_as, (self.kind, *super().__reduce__()[1][1:])


def config_error_as(kind: type[Exception]) -> type[ConfigError]:
    """Return a ConfigError class that also derives from ``kind``, the error type of a third-party function."""
    if issubclass(ConfigError, kind):
        return ConfigError
    return type(ConfigError.__name__, (_Refusal, kind), {"kind": kind})


def _rebuild_error_as(kind: type[Exception], *parts: Any) -> NpuZeroError:
    return _rebuild_error(config_error_as(kind), *parts)


class ContractError(NpuZeroError, ValueError):
    """Refuse an argument that breaks an op's contract (dtype, device, size, overlap)."""


class KernelUnavailable(NpuZeroError, RuntimeError):
    """Report that the op has no kernel for this device in this build."""


class CoreMissing(NpuZeroError, ImportError):
    """Report that the compiled core is missing: the package was not built in the place that it is imported from."""


class PackageMissing(NpuZeroError, ImportError):
    """Report that an optional package is not installed, and how to install it."""


class StateError(NpuZeroError, RuntimeError):
    """Refuse a call that does not fit the current state of a unit, model or optimizer."""


class NonFiniteError(NpuZeroError, FloatingPointError):
    """Stop at an output, a loss or a gradient that is inf or NaN, and report where it began."""


class OutOfSpace(NpuZeroError, MemoryError):
    """Report that a memory space cannot hold a requested allocation."""


class CollectiveError(NpuZeroError, RuntimeError):
    """Report that a collective failed: a rank died, timed out, or made a different call."""


class StorageError(NpuZeroError, OSError):
    """Report that a file or block device failed."""


class BenchmarkError(NpuZeroError, RuntimeError):
    """Report that a contender gave a wrong result, failed, or timed out. No figure was written."""


class CheckpointError(NpuZeroError, RuntimeError):
    """Report that a checkpoint is missing, incomplete, or does not fit the model."""


# -- unknown names -----------------------------------------------------------------------------------------------------


def find_nearest_name(given: object, known: Iterable[str]) -> Any:
    """Return the name in ``known`` that ``given`` probably misspells; None if none is close.

    Args:
        known: names; or a mapping from spelling to name.
    """
    words = known if isinstance(known, Mapping) else {word: word for word in known}
    spellings = {spelling.lower(): word for spelling, word in words.items()}
    near = difflib.get_close_matches(str(given).lower(), spellings, n=1)
    return spellings[near[0]] if near else None


def did_you_mean(given: object, known: Iterable[str], otherwise: str) -> str:
    """Return the remedy for the unknown name ``given``: suggest the nearest known name, or ``otherwise``."""
    near = find_nearest_name(given, known)
    return otherwise if near is None else f"Did you mean {near!r}?"


def describe_differing_names(missing: Sequence[str], unknown: Sequence[str], most: int = 5) -> str:
    """Describe how two sets of names differ: the first ``most`` missing and unknown names, with counts of the rest.

    A missing name is followed by the nearest unknown name:
    ``missing 'scale' (there is 'scaled'), 'norm.bias'; unknown 'scaled' and 3 more``
    """
    near = {name: find_nearest_name(name, unknown) for name in missing[:most]}
    lists = {
        "missing": [f"{name!r}" + (f" (there is {other!r})" if other else "") for name, other in near.items()],
        "unknown": [repr(name) for name in unknown[:most]],
    }
    rest = {"missing": len(missing) - most, "unknown": len(unknown) - most}
    words = {
        kind: ", ".join(names) + (f" and {rest[kind]} more" if rest[kind] > 0 else "") for kind, names in lists.items()
    }
    return "; ".join(f"{kind} {text}" for kind, text in words.items() if text)


def refuse_unknown_keywords(**formerly: str) -> Callable[[_Callable], _Callable]:
    """Make a function or class refuse an unknown keyword argument with a ConfigError that names the nearest known one.

    The error is also a TypeError, as without this decorator. It adds a Python call to each call: do not use it in a hot
    path.

    Args:
        formerly: other known spellings (earlier names, or names in other libraries), mapped to the names used here.
    """

    def decorate(function: _Callable) -> _Callable:
        if isinstance(function, type):
            function.__init__ = decorate(function.__init__)  # type: ignore[misc]
            return function
        known = [name for name in inspect.signature(function).parameters if name != "self"]
        spellings = {**formerly, **{name: name for name in known}}

        @functools.wraps(function)
        def call(*args: Any, **options: Any) -> Any:
            for key in options:
                if key not in known:
                    name = function.__qualname__.removesuffix(".__init__")
                    raise config_error_as(TypeError)(
                        f"{name}({key}=...)",
                        expected=f"arguments among {', '.join(known)}",
                        got=repr(key),
                        do=did_you_mean(key, spellings, "Leave it out."),
                        key=key,
                    )
            return function(*args, **options)

        return cast(_Callable, call)

    return decorate
