"""Run transformers models on slices of sequences: attention, masks, positions and loss see the full sequences.

transformers looks up a model's attention and masks in a table, by a name in its config. A prepared model has its own
name in that table. The functions registered there call the model's previous ones on full sequences. The model's class
is not changed, so recomputing a block in backward finds the same functions.
"""

from __future__ import annotations

import importlib
import inspect
import itertools
import sys
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from npuzero.comm import Communicator, Mesh, World
from npuzero.errors import ConfigError
from npuzero.parallel.functions import all_to_all_dims
from npuzero.parallel.sequence_parallel.slices import (
    PACKED,
    check_sequence_heads,
    exchange_for_heads,
    sequence_group,
    token_loss,
)
from npuzero.plan import SEQUENCE
from npuzero.shard.layout.mesh_axes import bind_mesh

_NAMES = itertools.count()
_PREFIX = "npuzero_slices"


def sequence(model: nn.Module, mesh: Mesh) -> nn.Module:
    """Prepare a causal transformers model for slices of sequences; in place, before ``zero()``.

    Call it with the result of :func:`slice`, on all ranks of the mesh's ``sequence`` axis. Its attention, such as
    ``sdpa`` or ``eager``, runs on full sequences and some of the heads; masks cover full sequences; missing positions
    default to the slice's. With labels, ``model(...).loss`` is :func:`token_loss`.

    Args:
        model: a transformers model that computes attention by transformers' ``AttentionInterface``.
        mesh: from :func:`npuzero.mesh`.

    Returns:
        nn.Module: the same object.

    Raises:
        ConfigError: the ranks do not divide the heads; the model mixes tokens other than by attention, is not causal,
            or not of transformers. On a call: an argument that slices cannot support.

    Example::

        from transformers import LlamaConfig, LlamaForCausalLM

        mesh = npuzero.mesh(sequence=1)
        small = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1}
        llama = npuzero.parallel.sequence(LlamaForCausalLM(LlamaConfig(**small, num_attention_heads=4)), mesh)
        tokens = torch.randint(64, (1, 16))
        loss = llama(**npuzero.parallel.slice({"input_ids": tokens, "labels": tokens}, mesh)).loss
    """
    group = sequence_group(mesh)
    _check_causal_model(model, group.size)
    _SequenceSlicing(model, group)
    bind_mesh(model, mesh)
    if _predicts_tokens(model):
        model.loss_function = _make_token_loss(mesh)
    return model


def check_sequence_prepared(model: nn.Module, ranks: World | Mesh | None) -> None:
    """Check that :func:`sequence` has prepared a transformers model before it trains on a sequence axis.

    Raises:
        ConfigError: no module of ``model`` is prepared: its attention would see only slices.
    """
    if not isinstance(ranks, Mesh) or ranks.size((SEQUENCE,)) == 1:
        return
    found = {path: name for path, module in model.named_modules() if (name := _get_attention_name(module)) is not None}
    if found and not any(name.startswith(_PREFIX) for name in found.values()):
        raise ConfigError(
            "npuzero.zero(): mesh: axis sequence",
            expected=f"a model whose attention sees whole sequences, of which {ranks.size((SEQUENCE,))} ranks have a "
            "slice each",
            got=f"{type(model.get_submodule(next(iter(found)))).__name__}, whose attention is its own",
            do="Call npuzero.parallel.sequence(model, mesh) first. To train on whole sequences leave sequence= out of "
            "the mesh.",
            axis=SEQUENCE,
        )


def _get_attention_name(module: nn.Module) -> str | None:
    """Return the name of a transformers model's attention; None for another module."""
    name = getattr(getattr(module, "config", None), "_attn_implementation", None)
    return name if isinstance(name, str) else None


class _SequenceSlicing:
    """Hook the forward, the masks and the attention of one model on one rank."""

    def __init__(self, model: Any, group: Communicator) -> None:
        self._group = group
        self._own = model.config._attn_implementation or "eager"
        self._takes = list(inspect.signature(model.forward).parameters)
        self._learns = _predicts_tokens(model)
        self._packed: Tensor | None = None  # of the present forward
        self._attention = importlib.import_module("transformers.modeling_utils").ALL_ATTENTION_FUNCTIONS
        self._masking = importlib.import_module("transformers.masking_utils")
        self._install(model, f"{_PREFIX}_{next(_NAMES)}")

    def __deepcopy__(self, memo: object) -> _SequenceSlicing:
        return self  # copies of a model share its communicator

    def _install(self, model: Any, name: str) -> None:
        tables = self._attention, self._masking.ALL_MASK_ATTENTION_FUNCTIONS
        methods: tuple[Callable[..., Any], ...] = (self.attend, self.mask)
        for table, method in zip(tables, methods, strict=True):
            type(table).register(name, _make_weak_caller(weakref.WeakMethod(method)))
            weakref.finalize(self, type(table)._global_mapping.pop, name, None)
        model.set_attn_implementation(name)
        if model.config._attn_implementation != name:
            raise ConfigError(
                "parallel.sequence",
                expected="a model that computes attention by transformers' AttentionInterface",
                got=type(model).__name__,
                do="Wrap its attention by parallel.attention().",
            )
        model.register_forward_pre_hook(self.enter, with_kwargs=True)

    def enter(self, module: nn.Module, args: tuple[Any, ...], options: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        """Name the arguments of the model's forward, and add the slice's positions if there are none."""
        given = {**dict(zip(self._takes, args, strict=False)), **options}
        refused = [name for name in ("past_key_values", "output_attentions") if given.get(name)]
        refused += ["labels"] * (given.get("labels") is not None and not self._learns)
        if refused:
            raise ConfigError(
                f"{type(module).__name__}.forward",
                expected="what a model computes on slices of sequences",
                got=f"{refused[0]}, which needs whole ones",
                do="Compute the loss from the logits." if refused == ["labels"] else "Leave it out.",
            )
        tokens: Any = given.get("input_ids")
        tokens = given.get("inputs_embeds") if tokens is None else tokens
        if "use_cache" in self._takes:
            given["use_cache"] = False  # keys and values of a slice are useless to another forward
        if tokens is not None and given.get("position_ids") is None:
            begin = self._group.rank * tokens.shape[1]
            positions = torch.arange(begin, begin + tokens.shape[1], device=tokens.device)
            given["position_ids"] = positions.expand(tokens.shape[:2])
        self._packed = given.pop(PACKED, None)
        if self._packed is not None and given.get("attention_mask") is None:
            # Without a mask transformers would detect packed sequences itself, and only those in the slice.
            given["attention_mask"] = torch.ones_like(self._packed, dtype=torch.bool)
        return (), given

    def mask(self, **asked: Any) -> Any:
        """Return the mask of full sequences that the model's own attention takes."""
        seq, padding = asked["q_length"] * self._group.size, asked.get("attention_mask")
        wrong = None
        if not asked.get("allow_is_causal_skip", True) or asked.get("q_offset", 0):
            wrong = "another pattern, or generate(), which know this rank's slice alone"
        elif padding is not None and padding.shape[-1] != seq:
            wrong = f"attention_mask {list(padding.shape)}"
        if wrong:
            raise ConfigError(
                "parallel.sequence: attention mask",
                expected=f"a causal mask, and an attention_mask [batch, {seq}] of whole sequences, if any",
                got=wrong,
                do="Call the model itself, with what parallel.slice() returns.",
            )
        if self._packed is not None:
            packed = self._packed.to(asked["device"])

            def same(batch: Tensor, head: Tensor, q: Tensor, k: Tensor) -> Tensor:
                return packed[batch, q] == packed[batch, k]

            both = self._masking.and_masks(asked["mask_function"], same)
            asked.update(mask_function=both, allow_is_causal_skip=False)
        asked.update(q_length=seq, kv_length=seq)
        return self._masking.ALL_MASK_ATTENTION_FUNCTIONS[self._own](**asked)

    def attend(
        self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, **options: Any
    ) -> tuple[Tensor, None]:
        """Compute the model's own attention on this rank's heads of full sequences.

        Args:
            query: [batch, heads, seq / ranks, dim]; key, value: [batch, key heads, seq / ranks, dim].
            attention_mask: of full sequences, the same for all heads, or None.

        Returns:
            Tensor[batch, seq / ranks, heads, dim], and no weights.
        """
        options.pop("position_ids", None)  # of the slice; attention itself does not use them
        strangers = [name for name, given in options.items() if isinstance(given, Tensor)]
        if isinstance(attention_mask, Tensor) and attention_mask.dim() == 4:
            seq = query.shape[2] * self._group.size
            strangers += ["attention_mask"] * (tuple(attention_mask.shape[1:]) != (1, seq, seq))
        if strangers:
            raise ConfigError(
                f"parallel.sequence: {type(module).__name__}",
                expected="attention of queries, keys and values, with one mask of whole sequences for all heads",
                got=strangers[0],
                do="Leave it out, or use a model without it.",
            )
        q, k, v = exchange_for_heads(query, key, value, self._group)
        out, _ = self._own_attention(module)(
            _PartialAttention(module, q.shape[1] // k.shape[1]), q, k, v, attention_mask, **options
        )
        return all_to_all_dims(out, self._group, 1, 2), None

    def _own_attention(self, module: nn.Module) -> Any:
        """Return the attention that ``module`` would call: ``eager`` from its own file, others from the table."""
        eager = getattr(sys.modules[type(module).__module__], "eager_attention_forward", None)
        return self._attention.get_interface(self._own, eager)


def _make_weak_caller(method: weakref.WeakMethod[Callable[..., Any]]) -> Callable[..., Any]:
    """Return a function that calls ``method`` while the hook of a model, or of its copy, keeps the object alive."""

    def call(*args: Any, **options: Any) -> Any:
        bound = method()
        assert bound is not None
        return bound(*args, **options)

    return call


class _PartialAttention:
    """Present an attention module as one with some of its heads."""

    def __init__(self, module: nn.Module, groups: int) -> None:
        self._module = module
        self.num_key_value_groups = groups

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)


def _make_token_loss(mesh: Mesh) -> Any:
    def loss(logits: Tensor, labels: Tensor, *_: Any, num_items_in_batch: Any = None, **__: Any) -> Tensor:
        return token_loss(logits, labels, mesh, tokens=num_items_in_batch)

    return loss  # a function, so that copies of the model share it


def _predicts_tokens(model: nn.Module) -> bool:
    """Return whether labels are next tokens; also true if transformers does not know the model's loss."""
    return getattr(model, "loss_type", None) in (None, "ForCausalLM")


def _check_causal_model(model: Any, ranks: int) -> None:
    """Raise ConfigError if tokens mix other than in causal attention, or heads do not divide.

    The check reads only the model's class and config, so every rank raises.
    """
    try:
        known: Any = importlib.import_module("transformers").PreTrainedModel
    except ImportError:
        known = ()
    config: Any = getattr(model, "config", None)
    name = type(model).__name__
    if not isinstance(model, known):
        got, do = name, "Wrap the attention of your own model by parallel.attention()."
    elif config.is_encoder_decoder or config.get_text_config() is not config:
        got, do = f"{name}, which is more than that", "Prepare its causal model of text alone."
    elif getattr(model, "_is_stateful", False) or any(isinstance(m, nn.Conv1d | nn.RNNBase) for m in model.modules()):
        got, do = f"{name}, with layers that bring tokens together without attention", "Use another model."
    elif "position_ids" not in inspect.signature(model.forward).parameters:
        got, do = f"{name}, which takes no position_ids, and would count from 0 in every slice", "Use another model."
    elif str(config._attn_implementation).startswith(_PREFIX):
        got, do = f"{name}, which is prepared already", "Call it once."
    else:
        check_sequence_heads(f"parallel.sequence: {name}", config.num_attention_heads, ranks)
        return
    raise ConfigError("parallel.sequence", expected="a causal model of transformers", got=got, do=do)
