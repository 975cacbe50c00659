"""Each key of DeepSpeed's configuration has a rule, and no value is dropped in silence."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from compat.deepspeed import introspect
from npuzero.compat.deepspeed import RULES, VERSION, EngineRecipe, explain
from npuzero.compat.rules import Decision, flatten_mapping
from npuzero.compat.translation import Translation

HERE = Path(__file__).parent
KEYS = json.loads((HERE / "keys.json").read_text("utf-8"))
CONFIGS = {entry["source"]: entry["config"] for entry in json.loads((HERE / "configs.json").read_text("utf-8"))}
#: What transformers' Trainer fills in, for keys that say "auto".
FILLED = {
    "train_micro_batch_size_per_gpu": 2,
    "gradient_accumulation_steps": 1,
    "gradient_clipping": 1.0,
    "optimizer.params.lr": 1e-4,
    "optimizer.params.betas": [0.9, 0.999],
    "optimizer.params.eps": 1e-8,
    "optimizer.params.weight_decay": 0.0,
    "scheduler.params.warmup_min_lr": 0,
    "scheduler.params.warmup_max_lr": 1e-4,
    "scheduler.params.warmup_num_steps": 10,
    "scheduler.params.total_num_steps": 100,
    "bf16.enabled": True,
    "fp16.enabled": False,
}


def test_each_key_has_a_rule():
    keys = [key for keys in KEYS["keys"].values() for key in keys]
    assert KEYS["version"] == VERSION and len(keys) == len(set(keys)) > 370
    assert not [key for key in keys if RULES.find(key) is None and not RULES.below(key)]


def test_the_list_has_the_keys_of_the_package():
    deepspeed = pytest.importorskip("deepspeed", exc_type=ImportError)
    if deepspeed.__version__ != VERSION:
        pytest.skip(f"of DeepSpeed {deepspeed.__version__}, not {VERSION}")
    keys = {key for keys in KEYS["keys"].values() for key in keys}
    assert {key for key, _ in introspect.pydantic_keys()} <= keys


def test_each_rule_says_what_follows():
    for rule in RULES:
        assert len(rule.words) > 8 and rule.words.endswith((".", "=)", ":")), rule.path
        goes = rule.decision in (Decision.HONOURED, Decision.TRANSLATED)
        assert bool(rule.target) is goes, f"{rule.path} goes {rule.target or 'nowhere'}"
        if rule.switch:
            assert RULES.find(rule.switch) is not None, rule.path


every_config = pytest.mark.parametrize("source", CONFIGS, ids=lambda source: source.rpartition("/")[2])


@every_config
def test_what_people_copy_passes_unmodified(source):
    found = explain(copy.deepcopy(CONFIGS[source]), world=2, auto=FILLED)
    refused = {entry.path for entry in found.decided(Decision.REFUSED)}
    assert refused == REFUSED.get(source.rpartition("/")[2], set()), found.rows()
    if not refused:
        assert EngineRecipe.of(found, 2).batch.total == 4


#: Of 24 files two ask for what is not there: a tensor-parallel cut, and sections that no DeepSpeed knows.
REFUSED = {
    "ds_z2_autotp_config.json": {"tensor_parallel.autotp_size"},
    "ds_z3_fp8_config.json": {"comms_config", "monitor_config"},
}


def test_of_24_files_22_pass():
    assert len(CONFIGS) == 24 and len(REFUSED) == 2
    for name in ("axolotl", "LLaMA-Factory", "accelerate", "transformers"):
        assert any(name in source for source in CONFIGS)


def replace_config_value(config: Mapping[str, Any], path: str, value: Any) -> dict[str, Any]:
    """The configuration with another value at one path."""
    new: dict[str, Any] = copy.deepcopy(dict(config))
    *sections, key = path.split(".")
    inside = new
    for section in sections:
        inside = inside[section]
    inside[key] = value
    return new


def translation_outcome(found: Translation) -> Any:
    """What follows from a configuration, and what is said of each key."""
    said = [(entry.path, entry.decision, entry.words) for entry in found.entries]
    return said, None if found.decided(Decision.REFUSED) else EngineRecipe.of(found, 2)


def odd_config_values(value: Any) -> Iterator[Any]:
    """Other values than this one: of its kind, and of none."""
    if isinstance(value, bool):
        yield not value
    elif isinstance(value, (int, float)):
        yield value + 3
        yield -7
    yield "purple"
    yield {"purple": 1}


@every_config
def test_no_value_is_dropped_in_silence(source):
    """An odd value in any leaf gives another result, a note, or a refusal that names the key."""
    refused = {path.partition(".")[0] for path in REFUSED.get(source.rpartition("/")[2], ())}
    config = {key: value for key, value in CONFIGS[source].items() if key not in refused}
    before = translation_outcome(explain(config, world=2, auto=FILLED))
    for path, value in flatten_mapping(config):
        for other in odd_config_values(value):
            found = explain(replace_config_value(config, path, other), world=2, auto=FILLED)
            entries = {entry.path: entry for entry in found.entries}
            entry = entries.get(path) or entries[f"{path}.purple"]
            if entry.counts and translation_outcome(found) == before:
                pytest.fail(f"{path} = {other!r} has the effect of {value!r}")
            assert entry.words
    for path in ("purple", "zero_optimization.purple"):
        found = explain(replace_config_value(config, path, 1), world=2, auto=FILLED)
        assert path in {entry.path for entry in found.decided(Decision.REFUSED)}


@pytest.mark.parametrize(
    ("wrong", "near"),
    [
        ("gradient_cliping", "gradient_clipping"),
        ("zero_optimization.stage_3", "stage"),
        ("optimizer.params.learning_rate", ""),
        ("optimizer.params.beta", "betas"),
        ("bf16.enable", "enabled"),
    ],
)
def test_a_misspelt_key_is_told_the_nearest_one(wrong, near):
    config = {"train_batch_size": 4, "zero_optimization": {"stage": 1}, "bf16": {"enabled": True}}
    config["optimizer"] = {"type": "AdamW", "params": {"lr": 0.1}}
    found = explain(replace_config_value(config, wrong, 1), world=2)
    (entry,) = found.decided(Decision.REFUSED)
    assert entry.path == wrong and near in entry.words


@pytest.mark.parametrize(
    ("config", "path", "words"),
    [
        (
            {"zero_optimization": {"stage": 3, "zero_hpz_partition_size": 8}},
            "zero_optimization.zero_hpz_partition_size",
            "divisor of 2",
        ),
        (
            {"zero_optimization": {"stage": 3, "mics_shard_size": 64}},
            "zero_optimization.mics_shard_size",
            "divisor of 2",
        ),
        ({"overlap_comm": True}, "overlap_comm", "another place: zero_optimization.overlap_comm"),
        (
            {"zero_optimization": {"stage": 2, "gradient_clipping": 1.0}},
            "zero_optimization.gradient_clipping",
            "place: gradient_clipping",
        ),
    ],
)
def test_groups_that_do_not_divide_the_ranks_and_keys_in_another_place(config, path, words):
    found = explain({"train_batch_size": 8, **config}, world=2)
    refused = {entry.path: entry.words for entry in found.entries if entry.decision is Decision.REFUSED}
    assert list(refused) == [path] and words in refused[path]
