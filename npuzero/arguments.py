"""Checks of arguments that callers give: numbers, paths and files. Whatever comes, what leaves is a typed error."""

from __future__ import annotations

import json
import math
import os
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

from npuzero.errors import ConfigError

#: Bytes of the largest text file that is read: a configuration, an index of weights.
TEXT_BYTES = 256 << 20


def as_number(
    subject: str, value: object, expected: str, do: str, *, holds: Callable[[float], bool] = lambda _: True
) -> float:
    """Return ``value`` as a float: of Python, numpy, or a tensor of one element.

    Args:
        expected: in words.
        holds: whether a number is legal; NaN never is.

    Raises:
        ConfigError: it is no number, beyond float's range, or not legal.
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
    """Return ``value``, an integer from ``least`` on, of 63 bits.

    Raises:
        ConfigError: it is no such integer.
    """
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value < 2**63:
        expected = "a positive integer" if least == 1 else f"an integer from {least}"
        raise ConfigError(subject, expected=expected, got=describe_value(value), do=do)
    return value


def check_flag(subject: str, value: object) -> bool:
    """Return ``value`` as a bool: True, False, 1 or 0, of Python, numpy, or a tensor without dimensions.

    Raises:
        ConfigError: it is none of these, such as an array.
    """
    try:
        found = value.item() if getattr(value, "shape", None) == () else value  # type: ignore[attr-defined]
    except RuntimeError:  # of a tensor on meta
        found = None
    if not isinstance(found, int) or found not in {0, 1}:
        raise ConfigError(subject, expected="True or False", got=describe_value(value), do="Pass a bool.")
    return bool(found)


def check_callable(subject: str, value: object, do: str) -> None:
    """Raise ConfigError where ``value`` cannot be called."""
    if not callable(value):
        raise ConfigError(subject, expected="a callable", got=describe_value(value), do=do)


def as_path(subject: str, value: object) -> Path:
    """Return ``value``, a path in text, as a Path.

    Raises:
        ConfigError: it is none, or one that no file can have.
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
    """Open a regular file for reading and return its descriptor. Nothing else is waited for, or read without an end.

    Raises:
        OSError: there is none.
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
        OSError: there is none, or a larger one.
        UnicodeDecodeError: it is not in UTF-8.
    """
    with open(open_regular(path), "rb") as file:
        content = file.read(TEXT_BYTES + 1)
    if len(content) > TEXT_BYTES:
        raise OSError(None, f"more than {TEXT_BYTES >> 20} MiB")
    return content.decode("utf-8")


def parse_json(text: str | bytes) -> Any:
    """Return the values of a JSON text, in whose objects each key is there once.

    Raises:
        ValueError: it is no JSON, nested too deeply, or has a key twice.
    """
    try:
        return json.loads(text, object_pairs_hook=_refuse_duplicate_keys)
    except RecursionError as error:
        raise ValueError("lists and objects that are nested too deeply") from error


def _refuse_duplicate_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return an object of a JSON file, whose keys are there once: of two values one would be dropped."""
    value = dict(pairs)
    if len(value) < len(pairs):
        seen: set[str] = set()
        twice = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]
        raise ValueError(f"the key {twice!r} twice in one object")
    return value


def describe_value(value: Any) -> str:
    """Return a value as an error shows it: text on one line, cut short (of a tensor what it is), and type."""
    try:
        tensor = hasattr(value, "shape") and hasattr(value, "dtype")
        text = f"shape={tuple(value.shape)}, dtype={value.dtype}" if tensor else " ".join(repr(value).split())
    except Exception as error:  # of a repr that is somebody else's; an int may have too many digits
        text = f"a value whose repr raises {type(error).__name__}"
    return f"{text if len(text) <= 60 else text[:57] + '...'} ({type(value).__name__})"
