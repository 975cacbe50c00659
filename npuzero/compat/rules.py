"""Rules for the keys of another engine's configuration, as data.

A configuration is nested mappings; a key has a path such as ``"zero_optimization.stage"``. A rule gives for one path
the values that it takes, the decision and the reason. The walk
(:func:`npuzero.compat.translation.translate_configuration`) knows no key.

Invariants:
    * a path has one rule; a path without a rule is an unknown key, and refused;
    * a reader accepts a value as the source engine does, or names the values that the source engine accepts;
    * a refused key is noted instead where its value, one of ``unless``, asks for npuzero's own behaviour.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any, Final

from npuzero.errors import ConfigError


class Decision(str, Enum):
    """Name the decision for a key."""

    HONOURED = "honoured"  # npuzero has the same option, and the value is passed on unchanged
    TRANSLATED = "translated"  # the value is converted, or passed to another option
    NOTED = "noted"  # the key has no effect here, and the words give the reason
    REFUSED = "refused"  # npuzero lacks the feature, and the words give an alternative


class UnreadableValue(ValueError):
    """Describe the values that a reader accepts."""


#: Returns a value as it is understood, or raises UnreadableValue.
Reader = Callable[[Any], Any]


class _AbsentValue:
    """Mark a missing value, since None is a valid one."""

    def __repr__(self) -> str:
        return "(absent)"

    def __bool__(self) -> bool:
        return False


#: No value: for a key that the file lacks, and for a rule that gives none.
ABSENT: Final = _AbsentValue()


def read_anything(value: Any) -> Any:
    """Return any value as it is."""
    return value


def read_flag(value: Any) -> bool:
    """Read true or false; 0 and 1 count as well."""
    if isinstance(value, (bool, int)) and value in (0, 1):
        return bool(value)
    raise UnreadableValue("true or false")


def read_text_value(value: Any) -> str:
    """Read a text."""
    if isinstance(value, str):
        return value
    raise UnreadableValue("a text")


def number_reader(least: float | None = None, most: float | None = None, above: float | None = None) -> Reader:
    """Return a reader of finite numbers from ``least`` to ``most`` (inclusive), or greater than ``above``."""
    bounds = {"from": least, "above": above, "to": most}
    words = "".join(f" {word} {bound:.15g}" for word, bound in bounds.items() if bound is not None)

    # bool is an int in Python, and JSON's true is no number; infinity and NaN fail the last comparison.
    def read(value: Any) -> float:
        if isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) <= sys.float_info.max:
            low = (least is None or value >= least) and (above is None or value > above)
            if low and (most is None or value <= most):
                return value
        raise UnreadableValue(f"a number{words}")

    return read


def integer_reader(least: float | None = None, most: float | None = None) -> Reader:
    """Return a reader of integers in a range; ``5e8``, a float in JSON, counts as one."""
    inner = number_reader(least, most)

    def read(value: Any) -> int:
        try:
            found = inner(value)
        except UnreadableValue as error:
            raise UnreadableValue(str(error).replace("a number", "an integer")) from None
        if found != int(found):
            raise UnreadableValue("an integer")
        return int(found)

    return read


def choice_reader(*words: str, **meanings: Any) -> Reader:
    """Return a reader of given words, in any case. ``meanings`` maps a word to the value that it is read as."""
    known = {**{word: word for word in words}, **meanings}

    def read(value: Any) -> Any:
        if isinstance(value, str) and value.lower() in known:
            return known[value.lower()]
        raise UnreadableValue("one of " + ", ".join(known))

    return read


def list_reader(reader: Reader, length: int | None = None) -> Reader:
    """Return a reader of lists that reads each item by ``reader`` and returns a tuple."""

    def read(value: Any) -> tuple[Any, ...]:
        if not isinstance(value, (list, tuple)) or (length is not None and len(value) != length):
            raise UnreadableValue("a list" if length is None else f"a list of {length}")
        try:
            return tuple(map(reader, value))
        except UnreadableValue as error:
            raise UnreadableValue(f"a list, each item {error}") from None

    return read


def optional_reader(reader: Reader) -> Reader:
    """Return a reader that also accepts null (None)."""

    def read(value: Any) -> Any:
        try:
            return None if value is None else reader(value)
        except UnreadableValue as error:
            raise UnreadableValue(f"{error}, or null") from None

    return read


@dataclass(frozen=True)
class KeyRule:
    """Describe the decision for one key of a configuration.

    Args:
        path: keys from the top, joined by dots; a last ``*`` stands for any key.
        decision: the decision for the key.
        words: one or two sentences: the reason, the translation, or an alternative.
        target: owner and field that the value is passed to, as ``"AdamW.lr"``; :meth:`Translation.into` groups them by
            owner. Two keys with one target are two names of it. Empty if the value is passed to nothing.
        reads: reads the value as the source engine does, or raises UnreadableValue.
        unless: of a refused key, the values (as read) that ask for npuzero's own behaviour.
        switch: path of the key that turns this key's section on; while that is false, this key is noted with any value.
        absent: the source engine's default, if a missing key should be reported with it.
        auto: the value for ``"auto"`` where the caller gives none; ABSENT: "auto" is then refused.
        trap: a common misbelief about the key, or one that is true only in some versions.
    """

    path: str
    decision: Decision
    words: str
    target: str = ""
    reads: Reader = read_anything
    unless: tuple[Any, ...] = ()
    switch: str = ""
    absent: Any = ABSENT
    auto: Any = ABSENT
    trap: str = ""


class KeyRules:
    """Store the rules of one kind of configuration, and find them by path."""

    def __init__(self, rules: Iterable[KeyRule]) -> None:
        self._rules: dict[str, KeyRule] = {}
        self._below: dict[str, list[str]] = {}
        for rule in rules:
            if rule.path in self._rules:
                raise ConfigError("rules", expected="one rule for a path", got=rule.path, do="Drop one of the two.")
            self._rules[rule.path] = rule
            self._enter(rule.path)

    def __iter__(self) -> Iterator[KeyRule]:
        return iter(self._rules.values())

    def find(self, path: str) -> KeyRule | None:
        """Return the rule of the path, else the ``*`` rule of its section; None without either."""
        return self._rules.get(path) or self._rules.get(join_key_path(path.rpartition(".")[0], "*"))

    def below(self, path: str) -> tuple[str, ...]:
        """Return the keys that the section ``path`` may have, in the order of the rules; ``""`` is the top."""
        return tuple(self._below.get(path, ()))

    def _enter(self, path: str) -> None:
        section, _, key = path.rpartition(".")
        keys = self._below.setdefault(section, [])
        if key not in keys:
            keys.append(key)
            if section:
                self._enter(section)


def join_key_path(section: str, key: str) -> str:
    """Return the path of ``key`` in ``section``, where ``""`` is the top."""
    return f"{section}.{key}" if section else key


def flatten_mapping(values: Mapping[str, Any], section: str = "") -> Iterator[tuple[str, Any]]:
    """Yield (path, value) of each leaf of nested mappings."""
    for key, value in values.items():
        path = join_key_path(section, str(key))
        if isinstance(value, Mapping) and value:
            yield from flatten_mapping(value, path)
        else:
            yield path, value
