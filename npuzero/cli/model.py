"""A model given by its size or by a transformer's JSON: the shapes of its units, without building it."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from npuzero.config import Rule, Settings, describe
from npuzero.errors import ConfigError
from npuzero.plan import Plan, Report
from npuzero.shard.build import ParameterFacts, predict_units

Shapes = list[tuple[str, torch.Size]]
_SIZE = Rule(int, "a size of the model", least=1, most=2**40)
_FLAG = Rule(bool, "a switch of the model")


@dataclass(frozen=True)
class ModelShape:
    """Parameters by unit; the root unit, with what no block owns, comes first."""

    name: str
    units: tuple[tuple[tuple[str, torch.Size], ...], ...]

    @property
    def parameters(self) -> int:
        """Elements in all, without padding."""
        return sum(shape.numel() for unit in self.units for _, shape in unit)

    def predict(self, plan: Plan, world: int, settings: Settings, **facts: Any) -> Report:
        """What npuzero.predict gives for a module of these shapes, all trainable; ``facts`` as there."""
        units = [[ParameterFacts(name, shape) for name, shape in unit] for unit in self.units]
        return predict_units(units, plan, plan.mesh_shape(world), settings, **facts)


def from_size(parameters: int, units: int) -> ModelShape:
    """A model of equal units; what does not divide falls to the root unit.

    Raises:
        ConfigError: fewer parameters than units.
    """
    if parameters < units:
        raise ConfigError(
            "--parameters",
            expected=f"at least one for each of {units} units",
            got=str(parameters),
            do="Give the number of parameters, such as 7e9, and the number of blocks.",
        )
    each, rest = divmod(parameters, units)
    root = (("rest", torch.Size([rest])),) if rest else ()
    blocks = tuple(((f"units.{index}", torch.Size([each])),) for index in range(units))
    return ModelShape(f"{units} equal units", (root, *blocks))


def from_config(config: Mapping[str, Any], name: str) -> ModelShape:
    """A dense decoder of the Llama family from its JSON, by the names that Hugging Face's files use.

    Each block: query, key, value and output projections, a gated feed-forward layer, two norms. Other keys of the file
    do not change the count and are passed over.

    Raises:
        ConfigError: a size is missing, mistyped or impossible, or the model is no such decoder.
    """
    _refuse_experts(config, name)
    hidden, layers, inner, vocabulary, heads = (
        _SIZE.check(f"{name}: {key}", _required(config, key, name))
        for key in ("hidden_size", "num_hidden_layers", "intermediate_size", "vocab_size", "num_attention_heads")
    )
    kv_heads = _optional(config, "num_key_value_heads", heads, _SIZE, name)
    if hidden % heads and config.get("head_dim") is None:
        raise ConfigError(
            f"{name}: hidden_size", expected=f"a multiple of num_attention_heads = {heads}", got=str(hidden),
            do="Correct the sizes, or give head_dim.",
        )  # fmt: skip
    head = _optional(config, "head_dim", hidden // heads, _SIZE, name)
    biased = {key: _optional(config, key, False, _FLAG, name) for key in ("attention_bias", "mlp_bias")}
    tied = _optional(config, "tie_word_embeddings", False, _FLAG, name)
    block = [
        *_linear("q_proj", hidden, heads * head, biased["attention_bias"]),
        *_linear("k_proj", hidden, kv_heads * head, biased["attention_bias"]),
        *_linear("v_proj", hidden, kv_heads * head, biased["attention_bias"]),
        *_linear("o_proj", heads * head, hidden, biased["attention_bias"]),
        *_linear("gate_proj", hidden, inner, biased["mlp_bias"]),
        *_linear("up_proj", hidden, inner, biased["mlp_bias"]),
        *_linear("down_proj", inner, hidden, biased["mlp_bias"]),
        ("input_layernorm.weight", torch.Size([hidden])),
        ("post_attention_layernorm.weight", torch.Size([hidden])),
    ]
    root: Shapes = [("embed_tokens.weight", torch.Size([vocabulary, hidden])), ("norm.weight", torch.Size([hidden]))]
    if not tied:
        root.append(("lm_head.weight", torch.Size([vocabulary, hidden])))
    return ModelShape(name, (tuple(root), *(tuple(block) for _ in range(layers))))


def _linear(name: str, inputs: int, outputs: int, biased: bool) -> Shapes:
    weight = (f"{name}.weight", torch.Size([outputs, inputs]))
    return [weight, (f"{name}.bias", torch.Size([outputs]))] if biased else [weight]


def _required(config: Mapping[str, Any], key: str, name: str) -> Any:
    if config.get(key) is None:
        near = difflib.get_close_matches(key, config, n=1)
        raise ConfigError(
            f"{name}: {key}", expected="the sizes of a transformer, by Hugging Face's names", got="no such key",
            do=f"Did you mean {near[0]!r}?" if near else "Add it, or give --parameters and --units instead.",
        )  # fmt: skip
    return config[key]


def _optional(config: Mapping[str, Any], key: str, default: Any, rule: Rule, name: str) -> Any:
    value = config.get(key)
    return default if value is None else rule.check(f"{name}: {key}", value)


def _refuse_experts(config: Mapping[str, Any], name: str) -> None:
    for key in config:
        if "expert" in key and config[key]:
            raise ConfigError(
                f"{name}: {key}", expected="a dense model", got=describe(config[key]),
                do="Give --parameters and --units instead.",
            )  # fmt: skip
