"""Compute and saved activations of a model's units in one pass, measured on meta."""

from __future__ import annotations

import copy
import inspect
import itertools
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from npuzero.config import describe_value
from npuzero.errors import ConfigError, did_you_mean
from npuzero.planner.model_work.attention_kernels import DeviceKernels
from npuzero.planner.model_work.decoder import LlamaDecoder
from npuzero.planner.model_work.meter import OpMeter, UnitSpan
from npuzero.planner.models import ModelShape
from npuzero.shard.layout.find_units import UnitSpec, discover_units

ATTENTIONS = ("flash", "plain")


@dataclass(frozen=True)
class UnitWork:
    """Count one unit's work in the pass of one micro-batch on one rank.

    Work of nested units (blocks in the root) counts only for the nested unit.

    Attributes:
        flops: FLOPs of matrix products in forward; backward has twice as many.
        forward_bytes, backward_bytes: bytes that element-wise work, norms and similar kernels read and write.
        saved_bytes: bytes that forward saves for backward without recomputation, except parameters.
        input_bytes: bytes that recomputation saves: the unit's inputs.
        workspace_bytes: peak bytes within its forward or backward in addition to saved ones.
        kernels: kernel launches of forward.
    """

    flops: float
    forward_bytes: int
    backward_bytes: int
    saved_bytes: int
    input_bytes: int
    workspace_bytes: int
    kernels: int


@dataclass(frozen=True)
class ActivationStretch:
    """Describe the live activations of a pass while one unit's forward or backward runs.

    Attributes:
        unit, backward: the unit, and the direction.
        peak_bytes: peak, relative to the start.
        left_bytes: bytes at the end, relative to the start.
        gradient_bytes: gradients of its parameters from autograd, alive from the end until they are packed; included in
            ``peak_bytes``, not in ``left_bytes``.
    """

    unit: int
    backward: bool
    peak_bytes: int
    left_bytes: int
    gradient_bytes: int = 0


@dataclass(frozen=True)
class ModelWorkload:
    """Count a model's work by unit, in the order of its units: the root first.

    Attributes:
        kept, recomputed: the stretches of a pass in order, if blocks save all that backward needs, and if they save
            only their inputs.
    """

    units: tuple[UnitWork, ...]
    micro_batch: int
    sequence: int
    kept: tuple[ActivationStretch, ...] = ()
    recomputed: tuple[ActivationStretch, ...] = ()


def measure_workload(
    model: ModelShape,
    sequence: int,
    micro_batch: int = 1,
    attention: str = "flash",
    dtype: torch.dtype = torch.bfloat16,
    cpu: bool = False,
) -> ModelWorkload:
    """Return the compute and saved activations of one pass of a model on tokens.

    The model runs on meta, forward and backward, with a loss of its logits. Of equal blocks three run and represent
    all. FLOPs of matrix products are counted as in :mod:`torch.utils.flop_counter`, masked scores included.

    Args:
        sequence: tokens of a sequence.
        micro_batch: sequences.
        attention: ``"flash"`` keeps no scores, ``"plain"`` keeps them.
        dtype: dtype of parameters, and so of activations unless the model chooses another.
        cpu: count the tensors that CPU kernels save: they have no flash attention with dropout, save dropout masks in
            the dtype of values instead of one byte per element, and have no fused norm.

    Raises:
        ConfigError: sizes that are not positive, an unknown attention, or a model that does not run on tokens.

    Example::

        from npuzero.planner.model_work.units import measure_workload

        work = measure_workload(npuzero.planner.from_size(7 * 10**9), sequence=4096)
        print(sum(unit.flops for unit in work.units), sum(unit.saved_bytes for unit in work.units))
    """
    for name, value in (("sequence", sequence), ("micro_batch", micro_batch)):
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            do = "Give a number of tokens or sequences."
            raise ConfigError(f"workload: {name}", expected="a positive integer", got=describe_value(value), do=do)
    if attention not in ATTENTIONS:
        do = did_you_mean(attention, ATTENTIONS, "Choose among these.")
        raise ConfigError("attention", expected=f"one of {', '.join(ATTENTIONS)}", got=repr(attention), do=do)
    return _measure_pass(model, _PassRequest(sequence, micro_batch, dtype, attention, cpu))


@dataclass(frozen=True)
class _PassRequest:
    """Hold the arguments of :func:`measure_workload`, as a cache key."""

    sequence: int
    micro_batch: int
    dtype: torch.dtype
    attention: str
    cpu: bool


@lru_cache(maxsize=256)
def _measure_pass(shape: ModelShape, asked: _PassRequest) -> ModelWorkload:
    kept, recomputed = (_unfold_spans(*_run_representatives(shape, asked, recompute)) for recompute in (False, True))
    units = tuple(_unit_work(i, kept, recomputed) for i in range(len(shape.units)))
    return ModelWorkload(units, asked.micro_batch, asked.sequence, _make_stretches(kept), _make_stretches(recomputed))


def _unit_work(unit: int, kept: Sequence[UnitSpan], recomputed: Sequence[UnitSpan]) -> UnitWork:
    # A unit may have several spans per direction. Workspace excludes saved bytes: those at the end of a forward span,
    # and at the start of a backward span.
    own = [span for span in kept if span.unit == unit]
    forward, backward = ([span for span in own if span.backward is way] for way in (False, True))
    return UnitWork(
        flops=sum(span.flops for span in forward),
        forward_bytes=sum(span.moved_bytes for span in forward),
        backward_bytes=sum(span.moved_bytes for span in backward),
        saved_bytes=sum(span.end_bytes - span.begin_bytes for span in forward),
        input_bytes=sum(s.end_bytes - s.begin_bytes for s in recomputed if s.unit == unit and not s.backward),
        workspace_bytes=max((s.peak_bytes - (s.begin_bytes if s.backward else s.end_bytes) for s in own), default=0),
        kernels=sum(span.kernels for span in forward),
    )


def _make_stretches(spans: Sequence[UnitSpan]) -> tuple[ActivationStretch, ...]:
    return tuple(
        ActivationStretch(
            s.unit, s.backward, s.peak_bytes - s.begin_bytes, s.end_bytes - s.begin_bytes, s.gradient_bytes
        )
        for s in spans
    )


def _run_representatives(shape: ModelShape, asked: _PassRequest, recompute: bool) -> tuple[list[UnitSpan], list[int]]:
    """Run a pass of the model with few of its equal blocks; return its spans, and the representative of each unit."""
    if shape.module is None:
        raise ConfigError(
            f"{shape.name}: activations",
            expected="a model whose modules can be run",
            got="its shapes alone",
            do="Run: pip install transformers; or give --parameters instead.",
        )
    model, specs = _build_units(shape)
    like = _find_representatives([_block_signature(spec) for spec in specs])
    few = _copy_representatives(model, specs, like, asked)
    ids = torch.zeros(asked.micro_batch, asked.sequence, dtype=torch.long, device="meta")
    own = discover_units(few) if len(specs) > 1 else [UnitSpec("root", few, tuple(few.named_parameters()))]
    around = partial(DeviceKernels, asked.attention == "plain", asked.cpu)
    wraps = recompute and not _enable_recomputation(few, around)
    meter = OpMeter([spec.module for spec in own], wraps, around)
    meter.live.pass_over([ids])
    parameters = {p: i for i, spec in enumerate(own) for _, p in spec.parameters if p.requires_grad}
    try:
        with meter, around():
            loss = _compute_model_loss(few, ids)
            meter.backward(loss, parameters)
            del loss
    except Exception as error:
        raise ConfigError(
            f"{shape.name}: activations",
            expected="a model that computes a loss or logits of tokens, on meta",
            got=" ".join(f"{type(error).__name__}: {error}".split())[:300],
            do="Give a language model, or --parameters for one of its size.",
        ) from error
    return meter.finish(), like


@lru_cache(maxsize=8)
def _build_units(shape: ModelShape) -> tuple[nn.Module, list[UnitSpec]]:
    """Return the model's modules and units; they are inspected and copied, never run."""
    assert shape.module is not None
    model = shape.module()
    return model, discover_units(model)


def _block_signature(spec: UnitSpec) -> tuple[object, ...]:
    """Return a key that is equal for equal blocks: list, class, and parameters without the block's number."""
    path = spec.name.rpartition(".")[0]
    own = len(spec.name)
    facts = ((name[own:], tuple(p.shape), p.requires_grad) for name, p in spec.parameters)
    return path, type(spec.module), *facts


def _find_representatives(signatures: Sequence[tuple[object, ...]]) -> list[int]:
    """Return the representative of each unit: itself, or in a long run of equal units the second."""
    like: list[int] = []
    for _, run in itertools.groupby(range(len(signatures)), lambda i: signatures[i]):
        first, *rest = run
        like += [first, *rest[:1] * len(rest[:-1]), *rest[-1:]]
    return like


def _copy_representatives(
    model: nn.Module, specs: Sequence[UnitSpec], like: Sequence[int], asked: _PassRequest
) -> nn.Module:
    """Return a copy of the model with only the representative blocks, in the requested dtype and in training mode."""
    dropped = [spec.name for i, spec in enumerate(specs) if like[i] != i]
    # Mapping dropped blocks to None in the memo makes deepcopy skip them, so a large model is never copied in full.
    memo: dict[int, Any] = {id(model.get_submodule(name)): None for name in dropped}
    few: nn.Module = copy.deepcopy(model, memo)
    for path in {name.rpartition(".")[0] for name in dropped}:
        blocks = few.get_submodule(path)
        kept = [block for block in blocks._modules.values() if block is not None]
        blocks._modules.clear()
        blocks._modules.update({str(i): block for i, block in enumerate(kept)})
    for parameter in few.parameters():
        if parameter.is_floating_point():
            parameter.data = parameter.data.to(dtype=asked.dtype, device="meta")
    for module in few.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = buffer.to("meta")
    choose: Any = getattr(few, "set_attn_implementation", None)
    if choose is not None and asked.attention == "plain":
        choose("eager")
    return (LlamaDecoder(few) if getattr(few, "counted", False) else few).train()


def _enable_recomputation(model: nn.Module, around: Callable[[], AbstractContextManager[object]]) -> bool:
    """Enable a transformers model's own recomputation of blocks, within ``around``; return False if it has none."""
    if not getattr(model, "supports_gradient_checkpointing", False):
        return False

    def run_again(function: Callable[..., Any], *args: Any) -> Any:
        def run(*args: Any) -> Any:
            with around():
                return function(*args)

        return checkpoint(run, *args, use_reentrant=False)

    enable: Any = model.gradient_checkpointing_enable
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # newer releases warn about the old name
        enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    for module in model.modules():
        if hasattr(module, "_gradient_checkpointing_func"):
            vars(module)["_gradient_checkpointing_func"] = run_again
    return True


def _compute_model_loss(model: nn.Module, ids: Tensor) -> Tensor:
    """Return the loss of a transformers model, or of any module that maps tokens to logits."""
    takes = inspect.signature(model.forward).parameters
    if "input_ids" not in takes:
        logits = model(ids)
        return F.cross_entropy(logits.flatten(0, -2).float(), ids.flatten())
    given: dict[str, Any] = {"input_ids": ids}
    given |= {"labels": ids} if "labels" in takes else {}
    given |= {"use_cache": False} if "use_cache" in takes else {}
    if "decoder_input_ids" in takes:
        given["decoder_input_ids"] = ids
    out = model(**given)
    loss: Tensor = out.loss if "labels" in takes else out[0].float().mean()
    return loss


def _unfold_spans(spans: Sequence[UnitSpan], like: Sequence[int]) -> list[UnitSpan]:
    """Return the spans of the full model: a representative's spans are repeated for each block it represents."""
    chosen = sorted(set(like))  # indices of the representatives in the full model
    forward = list(_iter_block_spans([s for s in spans if not s.backward], chosen, like))
    backward = list(_iter_block_spans([s for s in spans if s.backward], chosen, like))
    return [span for group in (*forward, *backward) for span in group]


def _iter_block_spans(
    spans: Sequence[UnitSpan], chosen: Sequence[int], like: Sequence[int]
) -> Iterator[list[UnitSpan]]:
    """Yield each block's span and the root's spans after it, once per block that it represents."""
    groups: list[list[UnitSpan]] = [[]]
    for span in spans:
        if span.unit:
            groups.append([])
        groups[-1].append(span)
    for group in groups:
        if not group or not group[0].unit:
            yield group
            continue
        whole = chosen[group[0].unit]
        # Backward visits blocks in reverse, so the copies get descending unit numbers.
        alike = [i for i, each in enumerate(like) if each == whole]
        for i in reversed(alike) if group[0].backward else alike:
            yield [replace(span, unit=i if span.unit else 0) for span in group]
