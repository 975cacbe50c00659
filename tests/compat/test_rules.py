"""Rules, the walker and its report, over a configuration of their own."""

from __future__ import annotations

import pytest

from npuzero.compat import ABSENT, Decision, KeyRule, KeyRules, translate_configuration
from npuzero.compat.rules import (
    UnreadableValue,
    choice_reader,
    flatten_mapping,
    integer_reader,
    list_reader,
    number_reader,
    optional_reader,
    read_flag,
    read_text_value,
)
from npuzero.compat.translation import fill_auto_values
from npuzero.errors import ConfigError

H, T, N, R = Decision.HONOURED, Decision.TRANSLATED, Decision.NOTED, Decision.REFUSED
RULES = KeyRules(
    [
        KeyRule("rate", H, "As it is.", "Optimizer.lr", number_reader(least=0)),
        KeyRule("old_rate", H, "The old name.", "Optimizer.lr", number_reader(least=0)),
        KeyRule(
            "clip",
            T,
            "A call before the step.",
            "clip.max_norm",
            number_reader(least=0),
            absent=1.0,
            trap="0 before 2.0.",
        ),
        KeyRule("print", N, "Nothing is printed.", reads=read_flag),
        KeyRule("amp", R, "Use precision.", reads=read_flag, unless=(False,)),
        KeyRule("profiler.enabled", R, "Use torch.profiler.", reads=read_flag, unless=(False,)),
        KeyRule("profiler.steps", R, "Use torch.profiler.", reads=integer_reader(1), switch="profiler.enabled"),
        KeyRule("fp16.enabled", T, "A precision.", "precision.fp16", read_flag, absent=False),
        KeyRule("fp16.power", T, "A scale.", "LossScaler.power", integer_reader(), switch="fp16.enabled", absent=16),
        KeyRule("bucket", N, "Own buckets.", reads=integer_reader(1), auto=1),
        KeyRule("params.*", H, "As it is.", reads=number_reader()),
        KeyRule("mode", H, "A word.", "x.mode", choice_reader("auto", "fast")),
    ]
)


def translated_decisions(values, **auto):
    return {entry.path: entry.decision for entry in translate_configuration("a file", values, RULES, auto).entries}


def test_each_key_is_decided_by_its_rule_and_defaults_that_matter_are_told():
    found = translate_configuration(
        "a file", {"rate": 0.1, "print": True, "amp": False, "params": {"a": 1, "b": 2}}, RULES
    )
    assert [(e.path, e.decision) for e in found.entries] == [
        ("rate", H),
        ("print", N),
        ("amp", N),
        ("params.a", H),
        ("params.b", H),
        ("clip", T),
        ("fp16.enabled", T),
    ]
    assert found.into("Optimizer") == {"lr": 0.1} and found.into("clip") == {"max_norm": 1.0}
    assert found.value("rate") == 0.1 and found.value("print", "nothing") == "nothing"
    assert found.entries[-2].given is ABSENT and found.traps() == [("clip", "0 before 2.0.")]
    assert ("rate", "0.1", "honoured", "Optimizer.lr = 0.1", "As it is.") in found.rows()
    found.check()


@pytest.mark.parametrize(
    ("values", "path", "words"),
    [
        ({"rat": 1}, "rat", "'rate'"),
        ({"profiler": {"stepz": 1}}, "profiler.stepz", "'steps'"),
        ({"zzz": {"deep": 1}}, "zzz", "remove it"),
        ({"profiler": 3}, "profiler", "a section with enabled, steps"),
        ({"rate": "much"}, "rate", "a number from 0"),
        ({"rate": -1}, "rate", "a number from 0"),
        ({"rate": "auto"}, "rate", 'auto={"rate": ...}'),
        ({"amp": True}, "amp", "Use precision."),
        ({"amp": 3}, "amp", "true or false"),
        ({"rate": 1, "old_rate": 2}, "old_rate", "rate says 1: drop one"),
    ],
)
def test_what_cannot_be_followed_is_refused_by_name_with_a_way_out(values, path, words):
    found = translate_configuration("a file", values, RULES)
    assert [entry.path for entry in found.decided(R)] == [path]
    with pytest.raises(ConfigError, match=path) as caught:
        found.check()
    assert words in caught.value.do and caught.value.facts["refused"] == (path,)


def test_all_refusals_come_together():
    with pytest.raises(ConfigError) as caught:
        translate_configuration("a file", {"amp": True, "bad": 1}, RULES).check()
    assert caught.value.facts["refused"] == ("amp", "bad")


def test_auto_is_the_callers_then_the_rules_then_refused():
    assert translate_configuration("a file", {"rate": "auto"}, RULES, {"rate": 0.5}).into("Optimizer") == {"lr": 0.5}
    assert translated_decisions({"bucket": "auto"})["bucket"] is N
    assert translated_decisions({"rate": "auto"}, rate="nonsense")["rate"] is R
    assert translate_configuration("a file", {"mode": "auto"}, RULES).value("mode") == "auto", "a word of the key's own"


def test_values_for_auto_have_a_rule():
    with pytest.raises(ConfigError, match="Did you mean 'rate'"):
        translate_configuration("a file", {}, RULES, {"rat": 1})


def test_a_section_that_is_off_has_no_effect_but_for_what_cannot_be_read():
    assert translated_decisions({"profiler": {"enabled": False, "steps": 2}})["profiler.steps"] is N
    assert translated_decisions({"profiler": {"enabled": True, "steps": 2}})["profiler.steps"] is R
    assert translated_decisions({"profiler": {"steps": 0}})["profiler.steps"] is R, "no integer from 1"
    assert translated_decisions({"fp16": {"power": 3}})["fp16.power"] is N
    on = {"fp16": {"enabled": "auto", "power": 3}}
    assert translated_decisions(on, **{"fp16.enabled": True})["fp16.power"] is T
    assert translate_configuration("a file", {"fp16": {"enabled": True}}, RULES).into("LossScaler") == {"power": 16}


def test_what_other_keys_say_amends_an_entry():
    found = translate_configuration("a file", {"rate": 1}, RULES)
    found.refuse("rate", "Not with clip.")
    found.amend("new", N, "By the program.")
    assert [(e.path, e.given) for e in found.decided(R)] == [("rate", 1)]
    assert found.decided(N)[0].given is ABSENT and "refused=1" in repr(found)
    assert found.into("Optimizer") == {}


@pytest.mark.parametrize(
    ("reader", "good", "bad"),
    [
        (read_flag, [(True, True), (0, False)], ["true", 2, None, 1.0]),
        (read_text_value, [("a", "a")], [1, None]),
        (number_reader(least=1, most=2), [(1, 1), (1.5, 1.5)], [0.9, 2.1, True, "1", float("nan"), float("inf")]),
        (number_reader(above=0), [(1e-9, 1e-9)], [0]),
        (integer_reader(1), [(5e8, 500_000_000)], [1.5, 0, "7", None]),
        (choice_reader("a", bf16=7), [("A", "a"), ("bf16", 7)], ["c", 1]),
        (list_reader(number_reader(), 2), [([0.9, 0.95], (0.9, 0.95))], [[0.9], 0.9, ["a", 1]]),
        (optional_reader(read_flag), [(None, None), (True, True)], ["x"]),
    ],
)
def test_readers_take_values_as_the_other_side_does(reader, good, bad):
    for value, read in good:
        assert reader(value) == read and type(reader(value)) is type(read)
    for value in bad:
        with pytest.raises(UnreadableValue):
            reader(value)


def test_a_path_has_one_rule():
    with pytest.raises(ConfigError, match="one rule for a path"):
        KeyRules([KeyRule("a", N, "x"), KeyRule("a", N, "y")])
    assert RULES.below("") == tuple(dict.fromkeys(rule.path.split(".")[0] for rule in RULES))
    assert RULES.below("profiler") == ("enabled", "steps")


def test_leaves_and_attributes():
    assert dict(flatten_mapping({"a": {"b": 1, "c": {}}, "d": [1]})) == {"a.b": 1, "a.c": {}, "d": [1]}
    args = type("Args", (), {"lr": 3})()
    assert fill_auto_values({"rate": "lr", "clip": "max_norm"}, args) == {"rate": 3}
