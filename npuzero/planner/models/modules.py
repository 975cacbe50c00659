"""Modules of a decoder with shapes from npuzero's rules, on meta, so that its layers can be divided over ranks."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import nn

from npuzero.parallel.tensor_parallel.attention_heads import HEAD_SIZE, HEADS, KEY_VALUE_HEADS
from npuzero.shard.build import ParameterFacts

#: Kinds with the parameter names below (see :mod:`npuzero.planner.models.families`), and the rules to divide them.
DECODERS = ("llama", "mistral", "qwen2", "qwen3")
_BLOCK = {
    **dict.fromkeys(("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"), "colwise"),
    **dict.fromkeys(("self_attn.q_norm", "self_attn.k_norm"), "replicated_with_grad_allreduce"),
    **dict.fromkeys(("mlp.gate_proj", "mlp.up_proj"), "colwise"),
    **dict.fromkeys(("self_attn.o_proj", "mlp.down_proj"), "rowwise"),
}
_PLAN = {"embed_tokens": "embedding_rowwise", "lm_head": "colwise_gather_output"}
_PLAN |= {f"layers.*.{path}": word for path, word in _BLOCK.items()}


def build_decoder_modules(units: Sequence[Sequence[ParameterFacts]], heads: int) -> nn.Module:
    """Return modules with these parameters: the blocks in ``layers``, and the rules to divide them in ``tp_plan``.

    The attribute ``counted`` distinguishes them from a transformers model.
    """
    root, *blocks = units
    model = _build_modules(root)
    layers = nn.ModuleList(_build_modules(block) for block in blocks)
    for block in layers:
        attention = block.get_submodule("self_attn")
        head = attention.get_parameter("q_proj.weight").shape[0] // heads
        sizes = {HEADS[0]: heads, KEY_VALUE_HEADS[0]: attention.get_parameter("k_proj.weight").shape[0] // head}
        vars(attention).update(sizes | {HEAD_SIZE[0]: head})
    model.add_module("layers", layers)
    embedding = model.get_parameter("embed_tokens.weight")
    if not hasattr(model, "lm_head"):  # tied to the embedding
        model.add_module("lm_head", _build_leaf_module([ParameterFacts("lm_head.weight", embedding.shape)]))
        model.get_submodule("lm_head").register_parameter("weight", embedding)
    vars(model).update({"tp_plan": _PLAN, "counted": True})
    return model


def _build_modules(facts: Iterable[ParameterFacts]) -> nn.Module:
    """Return a module with parameters at the paths of ``facts``."""
    root = nn.Module()
    leaves: dict[str, list[ParameterFacts]] = {}
    for each in facts:
        leaves.setdefault(each.name.rpartition(".")[0], []).append(each)
    for path, parameters in leaves.items():
        if not path:
            root.register_parameter(parameters[0].name, nn.Parameter(torch.empty(parameters[0].shape, device="meta")))
            continue
        owner, _, name = path.rpartition(".")
        around = root
        if owner:
            around = dict(root.named_children()).get(owner) or nn.Module()
            root.add_module(owner, around)
        around.add_module(name, _build_leaf_module(parameters))
    return root


def _build_leaf_module(facts: Sequence[ParameterFacts]) -> nn.Module:
    """Return a Linear, an embedding or a norm with these parameters."""
    path, shape = facts[0].name.rpartition(".")[0], facts[0].shape
    if path.startswith("embed"):
        return nn.Embedding(shape[0], shape[1], device="meta")
    if len(shape) == 2:
        return nn.Linear(shape[1], shape[0], bias=len(facts) > 1, device="meta")
    return nn.RMSNorm(shape, device="meta")
