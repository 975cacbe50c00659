"""Shapes of well-known kinds of models, computed from their sizes; tests compare each with transformers' class."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from npuzero.config import SettingRule, describe_value
from npuzero.errors import ConfigError
from npuzero.planner.models.keys import DEPTH, FLAG, SIZE, missing_size_error, refuse_unknown_keys
from npuzero.shard.build import ParameterFacts

Shapes = list[tuple[str, tuple[int, ...]]]
#: Shapes of the root unit, and of each block, in the order the modules are registered.
Decoder = tuple[Shapes, Shapes]


class ModelSizes:
    """Read sizes and switches of a model's JSON, and record the keys that were read."""

    def __init__(self, config: Mapping[str, Any], name: str) -> None:
        self.config, self.name = config, name
        self.known = {"model_type", "architectures"}

    def size(self, key: str, rule: SettingRule = SIZE) -> int:
        """Return the value of ``key``, which is required."""
        self.known.add(key)
        if self.config.get(key) is None:
            raise missing_size_error(self.name, key, [other for other in self.config if other not in self.known])
        return int(rule.check(f"{self.name}: {key}", self.config[key]))

    def optional(self, key: str, default: int, null: bool = True) -> int:
        """Return the value of ``key``, or ``default`` if it is missing; ``null``: or None."""
        self.known.add(key)
        value = self.config.get(key)
        absent = value is None if null else key not in self.config
        return default if absent else int(SIZE.check(f"{self.name}: {key}", value))

    def flag(self, key: str, default: bool) -> bool:
        """Return the boolean value of ``key``, or ``default`` if it is missing or None."""
        self.known.add(key)
        value = self.config.get(key)
        return default if value is None else bool(FLAG.check(f"{self.name}: {key}", value))

    def only(self, key: str, value: object) -> None:
        """Refuse every value of ``key`` except ``value`` and None: no other is supported here.

        Raises:
            ConfigError: any other value.
        """
        self.known.add(key)
        found = self.config.get(key)
        if found is not None and found != value:
            raise ConfigError(
                f"{self.name}: {key}",
                expected=f"{value!r}: without transformers no other is counted",
                got=describe_value(found),
                do="Run: pip install transformers; or give --parameters instead.",
            )


def count_parameters(config: Mapping[str, Any], name: str) -> tuple[str, list[list[ParameterFacts]]]:
    """Return the class of a model of :data:`KINDS`, and its parameters by unit, the root unit first.

    Raises:
        ConfigError: a size is missing, mistyped or impossible, or the class is not the kind's language model.
    """
    architecture, depth_key, family = KINDS[config["model_type"]]
    sizes = ModelSizes(config, name)
    sizes.only("architectures", [architecture])
    root, block = family(sizes)
    depth = sizes.size(depth_key, rule=DEPTH)
    refuse_unknown_keys(config, sizes.known, name)
    return architecture, [_facts_from_shapes(root), *([_facts_from_shapes(block)] * depth)]


def _facts_from_shapes(shapes: Shapes) -> list[ParameterFacts]:
    return [ParameterFacts(name, torch.Size(shape)) for name, shape in shapes]


def _linear_shapes(name: str, inputs: int, outputs: int, biased: bool = True) -> Shapes:
    return [(f"{name}.weight", (outputs, inputs)), *([(f"{name}.bias", (outputs,))] if biased else [])]


def _transposed_linear_shapes(name: str, inputs: int, outputs: int) -> Shapes:
    return [(f"{name}.weight", (inputs, outputs)), (f"{name}.bias", (outputs,))]


def _norm_shapes(name: str, width: int, biased: bool = True) -> Shapes:
    return [(f"{name}.weight", (width,)), *([(f"{name}.bias", (width,))] if biased else [])]


def _embedding_shapes(name: str, entries: int, width: int) -> Shapes:
    return [(f"{name}.weight", (entries, width))]


def _head_shapes(sizes: ModelSizes, tied: bool, width: int, vocabulary: int) -> Shapes:
    return [] if sizes.flag("tie_word_embeddings", tied) else _linear_shapes("lm_head", width, vocabulary, False)


def _attention_shapes(sizes: ModelSizes, kv_heads: int | None, head: int | None, biased: tuple[bool, bool]) -> Shapes:
    """Return the shapes of grouped attention; ``biased``: of query, key and value; of the output."""
    width, heads = sizes.size("hidden_size"), sizes.size("num_attention_heads")
    kv_heads = sizes.optional("num_key_value_heads", kv_heads or heads, null=kv_heads is None)
    null = head is None
    if head is None:
        head = _divide_width(sizes, "hidden_size", width, "num_attention_heads", heads)
    head = sizes.optional("head_dim", head, null)
    return [
        *_linear_shapes("self_attn.q_proj", width, heads * head, biased[0]),
        *_linear_shapes("self_attn.k_proj", width, kv_heads * head, biased[0]),
        *_linear_shapes("self_attn.v_proj", width, kv_heads * head, biased[0]),
        *_linear_shapes("self_attn.o_proj", heads * head, width, biased[1]),
    ]


def _divide_width(sizes: ModelSizes, key: str, width: int, by: str, heads: int) -> int:
    if width % heads and sizes.config.get("head_dim") is None:
        raise ConfigError(
            f"{sizes.name}: {key}",
            expected=f"a multiple of {by} = {heads}",
            got=str(width),
            do="Correct the sizes.",
        )
    return width // heads


def _gated_mlp_shapes(sizes: ModelSizes, biased: bool = False) -> Shapes:
    width, inner = sizes.size("hidden_size"), sizes.size("intermediate_size")
    return [
        *_linear_shapes("mlp.gate_proj", width, inner, biased),
        *_linear_shapes("mlp.up_proj", width, inner, biased),
        *_linear_shapes("mlp.down_proj", inner, width, biased),
    ]


def _decoder_shapes(sizes: ModelSizes, layers: Shapes) -> Decoder:
    """Return a decoder of Llama's architecture: root mean square norms, a separate head."""
    width, vocabulary = sizes.size("hidden_size"), sizes.size("vocab_size")
    norms = [*_norm_shapes("input_layernorm", width, False), *_norm_shapes("post_attention_layernorm", width, False)]
    root = [*_embedding_shapes("embed_tokens", vocabulary, width), *_norm_shapes("norm", width, False)]
    return [*root, *_head_shapes(sizes, False, width, vocabulary)], [*layers, *norms]


def _llama(sizes: ModelSizes) -> Decoder:
    biased = sizes.flag("attention_bias", False)
    attention = _attention_shapes(sizes, None, None, (biased, biased))
    return _decoder_shapes(sizes, [*attention, *_gated_mlp_shapes(sizes, sizes.flag("mlp_bias", False))])


def _mistral(sizes: ModelSizes) -> Decoder:
    return _decoder_shapes(sizes, [*_attention_shapes(sizes, 8, None, (False, False)), *_gated_mlp_shapes(sizes)])


def _mixtral(sizes: ModelSizes) -> Decoder:
    sizes.known.add("num_experts_per_tok")
    width, inner = sizes.size("hidden_size"), sizes.size("intermediate_size")
    experts = sizes.size("num_local_experts")
    mixture: Shapes = [
        ("gate.weight", (experts, width)),
        ("experts.gate_up_proj", (experts, 2 * inner, width)),
        ("experts.down_proj", (experts, width, inner)),
    ]
    return _decoder_shapes(sizes, [*_attention_shapes(sizes, 8, None, (False, False)), *mixture])


def _qwen2(sizes: ModelSizes) -> Decoder:
    return _decoder_shapes(sizes, [*_attention_shapes(sizes, 32, None, (True, False)), *_gated_mlp_shapes(sizes)])


def _qwen3(sizes: ModelSizes) -> Decoder:
    biased = sizes.flag("attention_bias", False)
    attention = _attention_shapes(sizes, 32, 128, (biased, biased))
    head = sizes.optional("head_dim", 128)
    norms = [*_norm_shapes("self_attn.q_norm", head, False), *_norm_shapes("self_attn.k_norm", head, False)]
    return _decoder_shapes(sizes, [*attention, *norms, *_gated_mlp_shapes(sizes)])


def _gpt2(sizes: ModelSizes) -> Decoder:
    sizes.only("add_cross_attention", False)
    width, vocabulary = sizes.size("n_embd"), sizes.size("vocab_size")
    _divide_width(sizes, "n_embd", width, "n_head", sizes.size("n_head"))
    inner = sizes.optional("n_inner", 4 * width)
    for alias in ("hidden_size", "num_hidden_layers", "num_attention_heads", "max_position_embeddings"):
        sizes.only(alias, None)
    root = [
        *_embedding_shapes("wte", vocabulary, width),
        *_embedding_shapes("wpe", sizes.size("n_positions"), width),
        *_norm_shapes("ln_f", width),
        *_head_shapes(sizes, True, width, vocabulary),
    ]
    block = [
        *_norm_shapes("ln_1", width),
        *_transposed_linear_shapes("attn.c_attn", width, 3 * width),
        *_transposed_linear_shapes("attn.c_proj", width, width),
        *_norm_shapes("ln_2", width),
        *_transposed_linear_shapes("mlp.c_fc", width, inner),
        *_transposed_linear_shapes("mlp.c_proj", inner, width),
    ]
    return root, block


def _gpt_neox(sizes: ModelSizes) -> Decoder:
    width, inner, vocabulary = (sizes.size(key) for key in ("hidden_size", "intermediate_size", "vocab_size"))
    _divide_width(sizes, "hidden_size", width, "num_attention_heads", sizes.size("num_attention_heads"))
    biased = sizes.flag("attention_bias", True)
    root = [*_embedding_shapes("embed_in", vocabulary, width), *_norm_shapes("final_layer_norm", width)]
    block = [
        *_norm_shapes("input_layernorm", width),
        *_norm_shapes("post_attention_layernorm", width),
        *_linear_shapes("query_key_value", width, 3 * width, biased),
        *_linear_shapes("dense", width, width, biased),
        *_linear_shapes("dense_h_to_4h", width, inner),
        *_linear_shapes("dense_4h_to_h", inner, width),
    ]
    return [*root, *_head_shapes(sizes, False, width, vocabulary)], block


def _phi(sizes: ModelSizes) -> Decoder:
    width, inner, vocabulary = (sizes.size(key) for key in ("hidden_size", "intermediate_size", "vocab_size"))
    heads = sizes.size("num_attention_heads")
    sizes.only("head_dim", None)
    head = _divide_width(sizes, "hidden_size", width, "num_attention_heads", heads)
    kv_width = head * sizes.optional("num_key_value_heads", heads)
    normed = sizes.flag("qk_layernorm", False)
    root = [
        *_embedding_shapes("embed_tokens", vocabulary, width),
        *_norm_shapes("final_layernorm", width),
        *_head_shapes(sizes, False, width, vocabulary),
        ("lm_head.bias", (vocabulary,)),
    ]
    block = [
        *_linear_shapes("q_proj", width, width),
        *_linear_shapes("k_proj", width, kv_width),
        *_linear_shapes("v_proj", width, kv_width),
        *_linear_shapes("dense", width, width),
        *([*_norm_shapes("q_layernorm", head), *_norm_shapes("k_layernorm", head)] if normed else []),
        *_linear_shapes("fc1", width, inner),
        *_linear_shapes("fc2", inner, width),
        *_norm_shapes("input_layernorm", width),
    ]
    return root, block


def _bert(sizes: ModelSizes) -> Decoder:
    sizes.only("add_cross_attention", False)
    sizes.only("position_embedding_type", "absolute")
    sizes.only("tie_word_embeddings", True)
    width, inner, vocabulary = (sizes.size(key) for key in ("hidden_size", "intermediate_size", "vocab_size"))
    _divide_width(sizes, "hidden_size", width, "num_attention_heads", sizes.size("num_attention_heads"))
    root: Shapes = [
        *_embedding_shapes("word_embeddings", vocabulary, width),
        *_embedding_shapes("position_embeddings", sizes.size("max_position_embeddings"), width),
        *_embedding_shapes("token_type_embeddings", sizes.size("type_vocab_size"), width),
        *_norm_shapes("embeddings.LayerNorm", width),
        ("predictions.bias", (vocabulary,)),
        *_linear_shapes("predictions.transform.dense", width, width),
        *_norm_shapes("predictions.transform.LayerNorm", width),
    ]
    block = [
        *_linear_shapes("query", width, width),
        *_linear_shapes("key", width, width),
        *_linear_shapes("value", width, width),
        *_linear_shapes("attention.output", width, width),
        *_norm_shapes("attention.output.LayerNorm", width),
        *_linear_shapes("intermediate", width, inner),
        *_linear_shapes("output", inner, width),
        *_norm_shapes("output.LayerNorm", width),
    ]
    return root, block


#: model_type: its language model class, the key of its depth, the function of its shapes.
KINDS: dict[str, tuple[str, str, Callable[[ModelSizes], Decoder]]] = {
    "llama": ("LlamaForCausalLM", "num_hidden_layers", _llama),
    "mistral": ("MistralForCausalLM", "num_hidden_layers", _mistral),
    "mixtral": ("MixtralForCausalLM", "num_hidden_layers", _mixtral),
    "qwen2": ("Qwen2ForCausalLM", "num_hidden_layers", _qwen2),
    "qwen3": ("Qwen3ForCausalLM", "num_hidden_layers", _qwen3),
    "gpt2": ("GPT2LMHeadModel", "n_layer", _gpt2),
    "gpt_neox": ("GPTNeoXForCausalLM", "num_hidden_layers", _gpt_neox),
    "phi": ("PhiForCausalLM", "num_hidden_layers", _phi),
    "bert": ("BertForMaskedLM", "num_hidden_layers", _bert),
}
