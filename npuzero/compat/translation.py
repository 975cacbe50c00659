"""Walk over a configuration and report the decision for each key."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from npuzero.compat.rules import ABSENT, Decision, KeyRule, KeyRules, UnreadableValue, join_key_path
from npuzero.config import describe_value
from npuzero.errors import ConfigError, did_you_mean

#: The value that a file leaves to the calling program.
AUTO = "auto"


@dataclass(frozen=True)
class TranslatedKey:
    """Report the decision for one key.

    Args:
        path: of the key.
        given: the value in the file; ABSENT where the file has none and the source engine's default counts.
        value: the value as read; ABSENT if it could not be read.
        decision: the decision.
        target: owner and field that the value is passed to, ``"AdamW.lr"``; empty for none.
        words: the reason, the translation, or an alternative.
        trap: a common misbelief about the key.
    """

    path: str
    given: Any
    value: Any
    decision: Decision
    target: str
    words: str
    trap: str = ""

    @property
    def counts(self) -> bool:
        """Return whether the key has an effect."""
        return self.decision in (Decision.HONOURED, Decision.TRANSLATED)


class Translation:
    """Report the decision for each key of a configuration: honoured, translated, noted or refused.

    Args:
        subject: the configuration as errors name it: ``"deepspeed configuration ds.json"``.
    """

    def __init__(self, subject: str) -> None:
        self.subject = subject
        self._entries: dict[str, TranslatedKey] = {}

    def __repr__(self) -> str:
        counts = {decision.value: len(self.decided(decision)) for decision in Decision}
        return f"Translation({self.subject!r}, " + ", ".join(f"{name}={count}" for name, count in counts.items()) + ")"

    @property
    def entries(self) -> tuple[TranslatedKey, ...]:
        """Return all entries in the order of the file, then the defaults of missing keys."""
        return tuple(self._entries.values())

    def decided(self, decision: Decision) -> tuple[TranslatedKey, ...]:
        """Return the entries with this decision."""
        return tuple(entry for entry in self.entries if entry.decision is decision)

    def value(self, path: str, otherwise: Any = None) -> Any:
        """Return the value of a key as read, if the key has an effect; else ``otherwise``."""
        entry = self._entries.get(path)
        return entry.value if entry is not None and entry.counts else otherwise

    def into(self, owner: str) -> dict[str, Any]:
        """Return the fields of ``owner``: a target ``"AdamW.lr"`` gives ``lr``. Only keys that have an effect are
        included.
        """
        targets = ((entry.target.partition("."), entry.value) for entry in self.entries if entry.counts)
        return {field: value for (head, _, field), value in targets if head == owner and field}

    def add(self, entry: TranslatedKey) -> None:
        """Record the decision for a key."""
        self._entries[entry.path] = entry

    def amend(self, path: str, decision: Decision, words: str) -> None:
        """Change the decision for a key because of other keys or the program's arguments. The key may be missing in the
        file.
        """
        entry = self._entries.get(path) or TranslatedKey(path, ABSENT, ABSENT, decision, "", words)
        self.add(replace(entry, decision=decision, words=words))

    def refuse(self, path: str, words: str) -> None:
        """Refuse a key; ``words`` give the reason and an alternative."""
        self.amend(path, Decision.REFUSED, words)

    def check(self) -> None:
        """Raise if any key is refused.

        Raises:
            ConfigError: names each refused key, its value and an alternative; ``error.facts["refused"]`` has the paths.
        """
        refused = self.decided(Decision.REFUSED)
        if refused:
            raise ConfigError(
                self.subject,
                expected="keys that npuzero can follow",
                got=", ".join(f"{entry.path} = {_format_value(entry.given)}" for entry in refused),
                do=" ".join(f"{entry.path}: {entry.words}" for entry in refused),
                refused=tuple(entry.path for entry in refused),
            )

    def rows(self) -> list[tuple[str, str, str, str, str]]:
        """Return a table: key, value, decision, target and words of each entry."""
        return [
            (entry.path, _format_value(entry.given), entry.decision.value, _format_target(entry), entry.words)
            for entry in self.entries
        ]

    def traps(self) -> list[tuple[str, str]]:
        """Return (key, trap) of each entry that has a trap."""
        return [(entry.path, entry.trap) for entry in self.entries if entry.trap]


def translate_configuration(
    subject: str, values: Mapping[str, Any], rules: KeyRules, auto: Mapping[str, Any] | None = None
) -> Translation:
    """Walk over a configuration and decide on each key. Bad keys do not raise here but in :meth:`Translation.check`.

    Args:
        subject: the configuration as errors name it.
        values: nested mappings, as in the file.
        rules: the rule of each key.
        auto: values for the keys that are ``"auto"``, by path.

    Raises:
        ConfigError: ``auto`` has a path without a rule.
    """
    for path in auto or {}:
        if rules.find(path) is None:
            do = did_you_mean(path, (rule.path for rule in rules), "Leave it out.")
            raise ConfigError(f"{subject}: auto", expected="paths of keys", got=repr(path), do=do, key=path)
    walk = _ConfigurationWalk(Translation(subject), rules, auto or {}, values)
    walk.section("", values)
    walk.absent()
    return walk.translation


@dataclass
class _ConfigurationWalk:
    """Walk over one configuration, once."""

    translation: Translation
    rules: KeyRules
    auto: Mapping[str, Any]
    values: Mapping[str, Any]

    def section(self, section: str, values: Mapping[str, Any]) -> None:
        for key, value in values.items():
            path = join_key_path(section, str(key))
            if isinstance(value, Mapping) and value and self.rules.below(path):
                self.section(path, value)
            else:
                self.translation.add(self.key(section, str(key), value))

    def key(self, section: str, key: str, given: Any) -> TranslatedKey:
        """Return the decision for one key."""
        path = join_key_path(section, key)
        rule = self.rules.find(path)
        if given == {} and self.rules.below(path):
            return TranslatedKey(path, given, ABSENT, Decision.NOTED, "", "Nothing is in it.")
        if rule is None:
            return TranslatedKey(path, given, ABSENT, *self._unknown(section, key, given))
        try:
            return self._decided(rule, path, given, self._read(rule, path, given))
        except UnreadableValue as error:
            return TranslatedKey(path, given, ABSENT, Decision.REFUSED, rule.target, str(error))

    def _read(self, rule: KeyRule, path: str, given: Any) -> Any:
        """Return the value of a key as read. ``"auto"`` is replaced by the caller's value, else by the rule's."""
        value = given
        if isinstance(given, str) and given.lower() == AUTO and not _takes_auto(rule):
            value = self.auto.get(path, ABSENT)
            if value is ABSENT and rule.auto is not ABSENT:
                return rule.auto
            if value is ABSENT:
                do = f'write the value, or give auto={{"{path}": ...}}'
                raise UnreadableValue(f'"{AUTO}" has nobody to fill it in: {do}.')
        try:
            return rule.reads(value)
        except UnreadableValue as error:
            raise UnreadableValue(f"It takes {error}, and this is {describe_value(value)}.") from None

    def _decided(self, rule: KeyRule, path: str, given: Any, read: Any) -> TranslatedKey:
        decision, words = rule.decision, rule.words
        if rule.switch and not self._on(rule.switch):
            decision, words = Decision.NOTED, f"Without effect, as {rule.switch} is not true."
        elif decision is Decision.REFUSED and any(read == value and type(read) is type(value) for value in rule.unless):
            decision, words = Decision.NOTED, "It asks for what is done anyway."
        entry = TranslatedKey(path, given, read, decision, rule.target, words, rule.trap)
        other = self._other(entry)
        if other is None:
            return entry
        return replace(
            entry, decision=Decision.REFUSED, words=f"{other.path} says {_format_value(other.given)}: drop one."
        )

    def _other(self, entry: TranslatedKey) -> TranslatedKey | None:
        """Return the entry of another key that has the same target and a different value."""
        twins = (twin for twin in self.translation.entries if twin.counts and entry.counts and entry.target)
        return next((twin for twin in twins if twin.target == entry.target and twin.value != entry.value), None)

    def _unknown(self, section: str, key: str, given: Any) -> tuple[Decision, str, str]:
        """Return the decision for a key without a rule."""
        below = self.rules.below(join_key_path(section, key))
        if below:
            return (
                Decision.REFUSED,
                "",
                f"It takes a section with {', '.join(below)}, and this is {describe_value(given)}.",
            )
        known = [rule.path for rule in self.rules if rule.decision is not Decision.REFUSED]
        homes = [path for path in known if path.rpartition(".")[2] == key][:3]
        words = f"It belongs to another place: {' or '.join(homes)}." if homes else ""
        words = words or did_you_mean(key, self.rules.below(section), "No such key is known: remove it.")
        return Decision.REFUSED, "", words

    def _on(self, path: str) -> bool:
        """Return whether the switch at ``path`` is on, by the file, by the caller's value for "auto", or by the
        default.
        """
        rule, value = self.rules.find(path), _get_by_path(self.values, path)
        if isinstance(value, str) and value.lower() == AUTO:
            value = self.auto.get(path, ABSENT if rule is None else rule.auto)
        if value is ABSENT and rule is not None:
            value = rule.absent
        try:
            return bool(value if rule is None else rule.reads(value))
        except UnreadableValue:  # that key is refused under its own path
            return False

    def absent(self) -> None:
        """Add the source engine's defaults of the keys that the file lacks, where the rules have them."""
        said = {entry.path for entry in self.translation.entries} | {e.target for e in self.translation.entries}
        for rule in self.rules:
            if rule.absent is ABSENT or rule.path in said or (rule.target and rule.target in said):
                continue
            if rule.switch and not self._on(rule.switch):
                continue
            self.translation.add(
                TranslatedKey(rule.path, ABSENT, rule.absent, rule.decision, rule.target, rule.words, rule.trap)
            )


def fill_auto_values(attributes: Mapping[str, str], source: object) -> dict[str, Any]:
    """Return values for the keys that are "auto", by path, from the attributes that ``source`` has.

    Args:
        attributes: maps a path to the name of the attribute with its value.
        source: an object that may have them, such as parsed arguments.
    """
    found = {path: getattr(source, name, ABSENT) for path, name in attributes.items()}
    return {path: value for path, value in found.items() if value is not ABSENT}


def _takes_auto(rule: KeyRule) -> bool:
    """Return whether "auto" is a regular value of the key."""
    try:
        return rule.auto is ABSENT and rule.reads(AUTO) == AUTO and rule.decision is not Decision.REFUSED
    except UnreadableValue:
        return False


def _get_by_path(values: Mapping[str, Any], path: str) -> Any:
    found: Any = values
    for key in path.split("."):
        if not isinstance(found, Mapping) or key not in found:
            return ABSENT
        found = found[key]
    return found


def _format_value(value: Any) -> str:
    return repr(value) if value is ABSENT else describe_value(value).rpartition(" (")[0]


def _format_target(entry: TranslatedKey) -> str:
    return f"{entry.target} = {_format_value(entry.value)}" if entry.counts and entry.target else "-"
