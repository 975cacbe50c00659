"""Checks of callers' arguments: numbers, paths and files. Every invalid input raises a typed error."""

from __future__ import annotations

import json
import math
import os
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

from npuzero.errors import ConfigError

#: Maximum size in bytes of a text file: a configuration or an index of weights.
TEXT_BYTES = 256 << 20


def as_number(
    subject: str, value: object, expected: str, do: str, *, holds: Callable[[float], bool] = lambda _: True
) -> float:
    """Return ``value`` as a float. Accepts Python and numpy numbers, and one-element tensors.

    Args:
        expected: description of a legal value.
        holds: predicate for legal numbers; NaN is never legal.

    Raises:
        ConfigError: it is not a number, exceeds float's range, or is not legal.
    """
    try:
        if isinstance(value, (bool, str, bytes, bytearray)):
            raise TypeError
        found = float(value)  # type: ignore[arg-type]
        legal = not math.isnan(found) and holds(found)
    except (TypeError, ValueError, OverflowError, RuntimeError):
        legal = False
    if not legal:
        raise ConfigError(subject, expected=expected, got=describe_value(value), do=do)
    return found


def check_count(subject: str, value: object, do: str, *, least: int = 1) -> int:
    """Return ``value``, an integer of at least ``least`` and below 2**63.

    Raises:
        ConfigError: otherwise.
    """
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value < 2**63:
        expected = "a positive integer" if least == 1 else f"an integer from {least}"
        raise ConfigError(subject, expected=expected, got=describe_value(value), do=do)
    return value


def check_flag(subject: str, value: object) -> bool:
    """Return ``value`` as a bool. Accepts True, False, 1 and 0, of Python, numpy, or a 0-dim tensor.

    Raises:
        ConfigError: otherwise, for example for an array.
    """
    try:
        found = value.item() if getattr(value, "shape", None) == () else value  # type: ignore[attr-defined]
    except RuntimeError:  # a tensor on meta
        found = None
    if not isinstance(found, int) or found not in {0, 1}:
        raise ConfigError(subject, expected="True or False", got=describe_value(value), do="Pass a bool.")
    return bool(found)


def check_callable(subject: str, value: object, do: str) -> None:
    """Raise ConfigError if ``value`` is not callable."""
    if not callable(value):
        raise ConfigError(subject, expected="a callable", got=describe_value(value), do=do)


def as_path(subject: str, value: object) -> Path:
    """Return ``value``, a str or path-like, as a Path.

    Raises:
        ConfigError: it is not a path, or contains NUL or lone surrogates.
    """
    text = os.fspath(value) if isinstance(value, os.PathLike) else value
    try:
        if isinstance(text, str) and b"\0" not in os.fsencode(text):
            return Path(text)
    except UnicodeEncodeError:
        pass
    do = "Give a str or a pathlib.Path."
    raise ConfigError(subject, expected="a path, without NUL and lone surrogates", got=describe_value(value), do=do)


def open_regular(path: Path) -> int:
    """Open a regular file for reading and return its descriptor. Never blocks on a pipe or reads a device.

    Raises:
        OSError: it does not exist, or is not a regular file.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    mode = os.fstat(descriptor).st_mode
    if not stat.S_ISREG(mode):
        os.close(descriptor)
        raise OSError(None, "Is a directory" if stat.S_ISDIR(mode) else "a device or a pipe, no regular file")
    return descriptor


def read_text(path: Path) -> str:
    """Return the text of a regular file of at most ``TEXT_BYTES``.

    Raises:
        OSError: it does not exist, or is larger.
        UnicodeDecodeError: it is not UTF-8.
    """
    with open(open_regular(path), "rb") as file:
        content = file.read(TEXT_BYTES + 1)
    if len(content) > TEXT_BYTES:
        raise OSError(None, f"more than {TEXT_BYTES >> 20} MiB")
    return content.decode("utf-8")


def parse_json(text: str | bytes) -> Any:
    """Parse a JSON text. Duplicate keys in an object are an error.

    Raises:
        ValueError: it is not JSON, is nested too deeply, or has a duplicate key.
    """
    try:
        return json.loads(text, object_pairs_hook=_refuse_duplicate_keys)
    except RecursionError as error:
        raise ValueError("lists and objects that are nested too deeply") from error


def _refuse_duplicate_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Build a JSON object, refusing duplicate keys: one of the two values would be lost."""
    value = dict(pairs)
    if len(value) < len(pairs):
        seen: set[str] = set()
        twice = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]
        raise ValueError(f"the key {twice!r} twice in one object")
    return value


def describe_value(value: Any) -> str:
    """Return a value as errors display it: one line, truncated, with its type; a tensor as shape and dtype."""
    try:
        tensor = hasattr(value, "shape") and hasattr(value, "dtype")
        text = f"shape={tuple(value.shape)}, dtype={value.dtype}" if tensor else " ".join(repr(value).split())
    except Exception as error:  # a third-party repr may fail; an int may have too many digits
        text = f"a value whose repr raises {type(error).__name__}"
    return f"{text if len(text) <= 60 else text[:57] + '...'} ({type(value).__name__})"
