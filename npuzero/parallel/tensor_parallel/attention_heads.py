"""Attention heads of a module, read from its attributes, checked and divided over tensor ranks.

A head is never cut. Modules have their number of heads in attributes of well-known names, or in a config. On each rank
these must hold the rank's number, since forwards shape tensors by them.
"""

from __future__ import annotations

import math
from typing import Any

from torch import nn

from npuzero.errors import ConfigError
from npuzero.plan import divisors

#: Attributes of attention modules, and of configs, that hold the number of heads.
HEADS = ("num_attention_heads", "num_heads", "n_heads", "n_head", "heads", "nhead", "num_query_heads")
KEY_VALUE_HEADS = ("num_key_value_heads", "num_kv_heads", "n_kv_heads", "n_kv_head", "kv_heads")
HEAD_SIZE = ("head_dim", "head_size")
#: Attributes that hold the number of features, of one packed tensor, after Linears cut by columns.
FEATURES = ("split_size", "all_head_size", "inner_dim", "q_size", "kv_size", "intermediate_size")


def head_counts(module: nn.Module) -> tuple[int, int]:
    """Return the numbers of query heads and of key-value heads; 0: not an attention, or unknown."""
    if not is_attention(module):
        return 0, 0
    queries = _find_head_count(module, HEADS)
    return queries, _find_head_count(module, KEY_VALUE_HEADS) or queries


def is_attention(module: nn.Module) -> bool:
    """Return whether ``module`` itself has an attribute for the number or the size of heads."""
    return any(_read_positive_count(module, name) for name in (*HEADS, *KEY_VALUE_HEADS, *HEAD_SIZE))


def head_size(module: nn.Module) -> int:
    """Return the number of features of a head; 0: unknown."""
    return next((size for name in HEAD_SIZE if (size := _read_positive_count(module, name))), 0)


def check_attention_heads(path: str, module: nn.Module, ranks: int) -> None:
    """Check that tensor ranks divide the heads of an attention.

    Raises:
        ConfigError: they do not; the error lists the numbers of ranks that do.
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
    """Check that tensor ranks divide the heads in each span of an attention's weight.

    Raises:
        ConfigError: they would cut through a head; the error lists the numbers of ranks that would not.
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
    """Divide the head and feature counts in the attributes and the config of a module by ``ranks``."""
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
    """Forward all attributes of a config except the numbers of heads, which are this rank's."""

    def __init__(self, config: Any, **counts: int) -> None:
        self.__dict__.update(counts, _config=config)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "_config":  # copy asks for these before __init__ has run
            raise AttributeError(name)
        return getattr(self._config, name)


def _read_positive_count(owner: Any, name: str) -> int:
    value = getattr(owner, name, None)
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else 0


def _find_head_count(module: nn.Module, names: tuple[str, ...]) -> int:
    """Return the first count found in ``module``, or else in its config."""
    owners = (module, getattr(module, "config", None))
    return next((count for owner in owners for name in names if (count := _read_positive_count(owner, name))), 0)


def format_choices(numbers: list[int]) -> str:
    return " or ".join(map(str, numbers))
