"""Checks of the keys of a model's JSON: required keys exist, and no key that looks like a size is ignored."""

from __future__ import annotations

import difflib
from collections.abc import Collection, Mapping
from typing import Any

from npuzero.config import SettingRule, describe_value
from npuzero.errors import ConfigError, did_you_mean

SIZE = SettingRule(int, "a size of the model", least=1, most=2**40)
FLAG = SettingRule(bool, "a switch of the model")
#: Blocks are handled one by one, so their number is limited.
DEPTH = SettingRule(int, "blocks of the model", least=1, most=4096)


def missing_size_error(name: str, key: str, others: Collection[str], default: object = None) -> ConfigError:
    """Make the error of a size missing from the file; ``default``: the value that transformers would assume."""
    assumed = "" if default is None else f", of which transformers makes {default}"
    add = f"Add it: {default}, if that is meant." if default is not None else "Add it, or give --parameters instead."
    return ConfigError(
        f"{name}: {key}",
        expected="the sizes of the model, by the names that transformers has for its kind",
        got=f"no such key{assumed}",
        do=did_you_mean(key, others, add),
    )


def refuse_unknown_keys(
    config: Mapping[str, Any], known: Collection[str], name: str, sizes: Collection[str] = ()
) -> None:
    """Refuse a key that would be ignored but was meant to count: a near miss of a known name, or one about experts.

    Args:
        known: keys that are counted, or known not to matter.
        sizes: names of sizes in other kinds of models.

    Raises:
        ConfigError: an unknown key; the error names it.
    """
    absent = [key for key in known if key not in config]
    for key, value in config.items():
        if key in known:
            continue
        near = difflib.get_close_matches(key, absent, n=1, cutoff=0.9)
        if near or key in sizes or ("expert" in key and value):
            raise ConfigError(
                f"{name}: {key}",
                expected=f"a key of model_type {config.get('model_type')!r}",
                got=f"{describe_value(value)}, which would not be counted",
                do=f"Did you mean {near[0]!r}?" if near else "Correct model_type, or give --parameters instead.",
            )
