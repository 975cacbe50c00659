"""Rules: what becomes of each key of somebody else's configuration, as data.

A configuration is nested mappings; a key has a path such as ``"zero_optimization.stage"``. A rule says of one path
what its values may be, what is decided of it and why. The walker
(:func:`npuzero.compat.translation.translate_configuration`) knows no key.

Invariants:
    * one path, one rule; a path without a rule is an unknown key, and refused;
    * a reader takes a value as the other side would have taken it, or says what it would have taken;
    * what a refused key's ``unless`` has asks for what is done anyway, so it is noted.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any, Final

from npuzero.errors import ConfigError


class Decision(str, Enum):
    """Say what becomes of a key."""

    HONOURED = "honoured"  # npuzero has the same thing, and the value goes there as it is
    TRANSLATED = "translated"  # the value becomes another one, or goes elsewhere
    NOTED = "noted"  # nothing follows from it here, and the words say why that is well
    REFUSED = "refused"  # what it asks for is not there, and the words say what to do instead


class UnreadableValue(ValueError):
    """Say what a value should have been."""


#: Returns a value as it is understood, or raises Unreadable.
Reader = Callable[[Any], Any]


class _AbsentValue:
    """Stand for a value that is not there, since None is one."""

    def __repr__(self) -> str:
        return "(absent)"

    def __bool__(self) -> bool:
        return False


#: No value: of a key that the file does not have, and of a rule that says none.
ABSENT: Final = _AbsentValue()


def read_anything(value: Any) -> Any:
    """Return any value as it is."""
    return value


def read_flag(value: Any) -> bool:
    """Read true or false; 0 and 1 are, too."""
    if isinstance(value, (bool, int)) and value in (0, 1):
        return bool(value)
    raise UnreadableValue("true or false")


def read_text_value(value: Any) -> str:
    """Read a text."""
    if isinstance(value, str):
        return value
    raise UnreadableValue("a text")


def number_reader(least: float | None = None, most: float | None = None, above: float | None = None) -> Reader:
    """Return a reader of finite numbers in a range, which ends at ``least`` and ``most`` or begins above ``above``."""
    bounds = {"from": least, "above": above, "to": most}
    words = "".join(f" {word} {bound:.15g}" for word, bound in bounds.items() if bound is not None)

    def read(value: Any) -> float:
        if isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) <= sys.float_info.max:
            low = (least is None or value >= least) and (above is None or value > above)
            if low and (most is None or value <= most):
                return value
        raise UnreadableValue(f"a number{words}")

    return read


def integer_reader(least: float | None = None, most: float | None = None) -> Reader:
    """Return a reader of integers in a range; ``5e8`` is one, which JSON has as a float."""
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
    """Return a reader of some words, in any case; of ``meanings`` the value is what the word means."""
    known = {**{word: word for word in words}, **meanings}

    def read(value: Any) -> Any:
        if isinstance(value, str) and value.lower() in known:
            return known[value.lower()]
        raise UnreadableValue("one of " + ", ".join(known))

    return read


def list_reader(reader: Reader, length: int | None = None) -> Reader:
    """Return a reader of lists, of whose items each is read by ``reader``; the value is a tuple."""

    def read(value: Any) -> tuple[Any, ...]:
        if not isinstance(value, (list, tuple)) or (length is not None and len(value) != length):
            raise UnreadableValue("a list" if length is None else f"a list of {length}")
        try:
            return tuple(map(reader, value))
        except UnreadableValue as error:
            raise UnreadableValue(f"a list, each item {error}") from None

    return read


def optional_reader(reader: Reader) -> Reader:
    """Return a reader that takes null (None) beside what ``reader`` takes."""

    def read(value: Any) -> Any:
        try:
            return None if value is None else reader(value)
        except UnreadableValue as error:
            raise UnreadableValue(f"{error}, or null") from None

    return read


@dataclass(frozen=True)
class KeyRule:
    """Say what becomes of one key of a configuration.

    Args:
        path: keys from the top with dots between; a last ``*`` stands for whatever keys there are.
        decision: what becomes of it.
        words: why, what it becomes, or what to do instead: one sentence or two.
        target: where it goes, as ``"AdamW.lr"``: owner and field; :meth:`Translation.into` takes them by owner. Two
            keys with one target are two names of it. Empty for what goes nowhere.
        reads: takes the value as the other side does, or raises Unreadable.
        unless: of a refused key, the values (as read) that ask for what is done anyway.
        switch: path of the key that switches this one's section on; where its value is false this is noted, whatever it
            says.
        absent: the value where the file does not have the key, if that is one to know about: the other side's default.
        auto: the value for ``"auto"`` where the caller gives none; ABSENT: "auto" is then refused.
        trap: what people believe of the key that is not so, or is so in some versions alone.
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
    """Hold the rules of one kind of configuration, and find them by path."""

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
        """Return the rule of the path; else that of whatever is at its place; None where there is none."""
        return self._rules.get(path) or self._rules.get(join_key_path(path.rpartition(".")[0], "*"))

    def below(self, path: str) -> tuple[str, ...]:
        """Return the keys that the section ``path`` may have, in the rules' order; the top is ``""``."""
        return tuple(self._below.get(path, ()))

    def _enter(self, path: str) -> None:
        section, _, key = path.rpartition(".")
        keys = self._below.setdefault(section, [])
        if key not in keys:
            keys.append(key)
            if section:
                self._enter(section)


def join_key_path(section: str, key: str) -> str:
    """Return the path of ``key`` in ``section``, which is ``""`` at the top."""
    return f"{section}.{key}" if section else key


def flatten_mapping(values: Mapping[str, Any], section: str = "") -> Iterator[tuple[str, Any]]:
    """Yield path and value of each leaf of nested mappings."""
    for key, value in values.items():
        path = join_key_path(section, str(key))
        if isinstance(value, Mapping) and value:
            yield from flatten_mapping(value, path)
        else:
            yield path, value
