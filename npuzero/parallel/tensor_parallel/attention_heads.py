"""Attention heads of a module, as its attributes say them: checked before they are divided over tensor ranks.

A head is never cut. Modules know how many they have by attributes of well-known names, or by a config; each rank's must
say how many the rank has, since forwards shape by them.
"""

from __future__ import annotations

import math
from typing import Any

from torch import nn

from npuzero.errors import ConfigError
from npuzero.plan import divisors

#: Attributes of attention modules, and of configs, that say how many heads there are.
HEADS = ("num_attention_heads", "num_heads", "n_heads", "n_head", "heads", "nhead", "num_query_heads")
KEY_VALUE_HEADS = ("num_key_value_heads", "num_kv_heads", "n_kv_heads", "n_kv_head", "kv_heads")
HEAD_SIZE = ("head_dim", "head_size")
#: Attributes that say how many features, of one of the things packed, there are behind Linears cut by columns.
FEATURES = ("split_size", "all_head_size", "inner_dim", "q_size", "kv_size", "intermediate_size")


def head_counts(module: nn.Module) -> tuple[int, int]:
    """Return how many heads queries have, and how many keys and values; 0: it is no attention, or says nothing."""
    if not is_attention(module):
        return 0, 0
    queries = _find_head_count(module, HEADS)
    return queries, _find_head_count(module, KEY_VALUE_HEADS) or queries


def is_attention(module: nn.Module) -> bool:
    """Tell whether ``module`` itself says how many heads it has, or how large one is."""
    return any(_read_positive_count(module, name) for name in (*HEADS, *KEY_VALUE_HEADS, *HEAD_SIZE))


def head_size(module: nn.Module) -> int:
    """Return how many features a head has; 0: ``module`` says nothing."""
    return next((size for name in HEAD_SIZE if (size := _read_positive_count(module, name))), 0)


def check_attention_heads(path: str, module: nn.Module, ranks: int) -> None:
    """Check that tensor ranks divide the heads of an attention.

    Raises:
        ConfigError: they do not; it says how many would.
    """
    queries, keys = head_counts(module)
    for what, count in (("heads", queries), ("key-value heads", keys)):
        if count % ranks:
            fitting = divisors(math.gcd(queries or count, keys or count))
            raise ConfigError(
                f"parallel.tensor(): axis tensor: {what} of {path}",
                expected=f"a number of {what} that {ranks} tensor ranks divide",
                got=f"{count} {what}" + (f" ({queries} of queries)" if count != queries else ""),
                do=f"Choose tensor={format_choices(fitting)}: a head lies on one rank, and is not repeated.",
                axis="tensor",
                divisors=fitting,
            )


def check_features(path: str, module: nn.Module, spans: tuple[int, ...], ranks: int) -> None:
    """Check that tensor ranks divide the heads that the spans of one weight of an attention have.

    Raises:
        ConfigError: they would cut through a head; it says how many ranks would not.
    """
    size = head_size(module)
    if not size or all(span % (size * ranks) == 0 for span in spans):
        return
    heads = [span / size for span in spans]
    fitting = divisors(math.gcd(*spans) // size) if all(count == int(count) for count in heads) else [1]
    raise ConfigError(
        f"parallel.tensor(): axis tensor: parameter {path}",
        expected=f"whole heads of {size} features on each of {ranks} tensor ranks",
        got=", ".join(f"{span} features = {count:g} heads" for span, count in zip(spans, heads, strict=True)),
        do=f"Choose tensor={format_choices(fitting)}: a head lies on one rank, and is not repeated.",
        axis="tensor",
        divisors=fitting,
    )


def divide_attributes(module: nn.Module, ranks: int) -> None:
    """Have the attributes of a module around cut Linears, and its config, say what one of ``ranks`` has."""
    for name in (*HEADS, *KEY_VALUE_HEADS, *FEATURES):
        if count := _read_positive_count(module, name):
            setattr(module, name, count // ranks)
    config = getattr(module, "config", None)
    if config is not None and is_attention(module):
        counts = {
            name: count // ranks for name in (*HEADS, *KEY_VALUE_HEADS) if (count := _read_positive_count(config, name))
        }
        if counts:
            module.config = RankConfig(config, **counts)  # type: ignore[assignment]


class RankConfig:
    """Show a config as it is, but for the numbers of heads, which are those of one rank."""

    def __init__(self, config: Any, **counts: int) -> None:
        self.__dict__.update(counts, _config=config)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "_config":  # asked for by copy before there is any
            raise AttributeError(name)
        return getattr(self._config, name)


def _read_positive_count(owner: Any, name: str) -> int:
    value = getattr(owner, name, None)
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else 0


def _find_head_count(module: nn.Module, names: tuple[str, ...]) -> int:
    """Return the first of the counts that ``module``, or else its config, says."""
    owners = (module, getattr(module, "config", None))
    return next((count for owner in owners for name in names if (count := _read_positive_count(owner, name))), 0)


def format_choices(numbers: list[int]) -> str:
    return " or ".join(map(str, numbers))
