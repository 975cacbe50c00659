"""The keys of a model's JSON: what is read of it is there, and nothing that looks like a size is passed over."""

from __future__ import annotations

import difflib
from collections.abc import Collection, Mapping
from typing import Any

from npuzero.config import SettingRule, describe_value
from npuzero.errors import ConfigError, did_you_mean

SIZE = SettingRule(int, "a size of the model", least=1, most=2**40)
FLAG = SettingRule(bool, "a switch of the model")
#: Blocks are counted one by one.
DEPTH = SettingRule(int, "blocks of the model", least=1, most=4096)


def missing_size_error(name: str, key: str, others: Collection[str], default: object = None) -> ConfigError:
    """Make the error of a size that the file does not say; ``default``: what its absence would be taken for."""
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
    """Refuse a key that would be passed over but was meant to count: almost a known one's name, or about experts.

    Args:
        known: keys that are counted, or are known not to count.
        sizes: names that other kinds of models have for their sizes.

    Raises:
        ConfigError: naming the key.
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
