"""``npuzero config`` says what becomes of a file's keys."""

from __future__ import annotations

import json

import pytest

from npuzero.cli import main

CONFIG = {
    "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": 2,
    "zero_optimization": {"stage": 2, "reduce_bucket_size": 5e8},
    "optimizer": {"type": "Adam", "params": {"lr": "auto"}},
    "steps_per_print": 10,
    "gradient_cliping": 1.0,
}


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "ds.json"
    path.write_text(json.dumps(CONFIG), "utf-8")
    return str(path)


def test_explain_prints_each_key_with_its_decision_and_the_traps(file, capsys):
    assert main(["config", "explain", file]) == 0
    text = capsys.readouterr().out
    rows = {line.split()[0]: line for line in text.splitlines() if line.strip()}
    for key, words in {
        "zero_optimization.stage": ("2", "honoured", "zero.stage = 2"),
        "optimizer.type": ("'Adam'", "translated"),
        "optimizer.params.lr": ("'auto'", "refused", "nobody"),
        "steps_per_print": ("10", "noted"),
        "gradient_cliping": ("refused", "'gradient_clipping'?"),
        "gradient_clipping": ("(absent)", "1"),
    }.items():
        assert all(word in rows[key] for word in words), rows[key]
    traps = text.partition("\nTraps\n")[2]
    assert "Adam means AdamW" in traps and "count elements" in traps and "3 honoured" in traps
    assert max(map(len, text.splitlines())) < 220


def test_auto_is_filled_and_the_world_known(file, capsys):
    arguments = ["config", "explain", file, "--world", "4", "--json", "--auto", "optimizer.params.lr=1e-4"]
    assert main(arguments) == 0
    facts = json.loads(capsys.readouterr().out)
    found = {entry["key"]: entry for entry in facts["entries"]}
    assert found["optimizer.params.lr"]["goes to"] == "optimizer.lr = 0.0001"
    assert facts["traps"]["gradient_clipping"].startswith("Absent it is 1.0")


def test_keys_prints_every_rule(capsys):
    assert main(["config", "keys", ".json"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert sum(1 for line in lines if not line.startswith(" ")) > 380


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("ds.jsn", "{}", "a name that ends in .json"),
        ("ds.json", "{", "JSON in UTF-8"),
        ("ds.json", '{"bf16": {"enabled": true, "enabled": false}}', "the key 'enabled' twice"),
        ("ds.json", "[1]", "a JSON object"),
    ],
)
def test_a_file_that_is_none_is_one_line(tmp_path, name, text, words, capsys):
    path = tmp_path / name
    path.write_text(text, "utf-8")
    assert main(["config", "explain", str(path)]) == 2
    error = capsys.readouterr().err
    assert words in error and error.count("\n") == 1


def test_a_value_for_auto_has_a_key(file, capsys):
    assert main(["config", "explain", file, "--auto", "lr"]) == 2
    assert "KEY=VALUE" in capsys.readouterr().err
