"""Tensor, sequence and pipeline axes: compute of a rank's units, traffic of their layers, and pipeline stages."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import torch
from torch import nn

from npuzero.comm.mesh import count_axis_groups
from npuzero.errors import ConfigError
from npuzero.parallel.sequence_parallel.slices import check_sequence_heads
from npuzero.parallel.tensor_parallel.api import MODES, ActivationMode, mark_parameters
from npuzero.parallel.tensor_parallel.attention_heads import head_counts, head_size
from npuzero.parallel.tensor_parallel.divide import TensorDivision, build_tensor_division, get_linear
from npuzero.parallel.tensor_parallel.plan_words import RuleKind
from npuzero.plan import PIPE, POD, SEQUENCE, TENSOR, Axes, MeshShape, Plan, ring_bytes
from npuzero.planner.hardware.cluster import Cluster
from npuzero.planner.hardware.network import collective_s
from npuzero.planner.model_work.units import ModelWorkload, UnitWork
from npuzero.planner.models import ModelShape
from npuzero.shard.build import get_unit_parameters
from npuzero.shard.layout.find_units import discover_units


def arrange_mesh(
    ranks: int, host: int, *, tensor: int = 1, sequence: int = 1, pipe: int = 1, pod: int = 1
) -> MeshShape:
    """Return the sizes of the axes as :func:`npuzero.mesh` arranges ``ranks``, with ``host`` ranks per host.

    Raises:
        ConfigError: the sizes do not multiply to the ranks.
    """
    stage = count_axis_groups(PIPE, pipe, ranks, ranks)
    data = count_axis_groups(TENSOR, tensor, stage, ranks)
    rest = count_axis_groups(POD, pod, data, ranks)
    count_axis_groups(SEQUENCE, sequence, data, ranks)
    local = math.gcd(max(1, host // tensor), rest)
    return MeshShape(rest // local, local, pipe=pipe, pod=pod, tensor=tensor, sequence=sequence)


@lru_cache(maxsize=16)
def divide_model_shape(model: ModelShape, ranks: int, mode: str = "mtp") -> ModelShape:
    """Return the model with its parameters cut over tensor ranks, as :func:`npuzero.parallel.tensor` cuts them.

    Raises:
        ConfigError: its layers or heads cannot be divided, or no rules for that are known.
    """
    if ranks == 1:
        return model
    module = _get_divisible_module(model, "tensor", ranks)
    if not getattr(module, "tp_plan", None):
        do = "In a program give parallel.tensor(plan=...) the words, and npuzero.predict the model."
        raise _unknown_division_error(model, "tensor", ranks, f"none in {type(module).__name__}", do)
    mark_parameters(module, build_tensor_division(module, None, ranks, MODES[mode].sliced))
    return replace(model, units=get_unit_parameters(module), module=lambda: module, mode=mode, undivided=model)


def _get_divisible_module(model: ModelShape, axis: str, ranks: int) -> nn.Module:
    if model.module is None:
        raise _unknown_division_error(
            model, axis, ranks, "none that is known without transformers", "Run: pip install transformers."
        )
    return model.module()


def _unknown_division_error(model: ModelShape, axis: str, ranks: int, got: str, do: str) -> ConfigError:
    expected = "a kind of model whose division is known: base_model_tp_plan of transformers"
    return ConfigError(f"{model.name}: --{axis} {ranks}", expected=expected, got=got, do=do)


@dataclass(frozen=True)
class LayerTraffic:
    """Hold the collectives of a model's layers for each token of a rank's micro-batch, forward and backward together.

    Attributes:
        sent: by unit, for each collective its verb, its axes, and the features per token.
    """

    sent: tuple[tuple[tuple[str, Axes, int], ...], ...]

    @staticmethod
    def of(model: ModelShape, mesh: MeshShape) -> LayerTraffic:
        """Return the collectives of ``model``'s layers along ``mesh``.

        Args:
            model: a model divided over the tensor ranks by :func:`divide_model_shape`.

        Raises:
            ConfigError: the model is not divided, or sequence ranks do not divide its heads.
        """
        return _build_layer_traffic(model, mesh.tensor, mesh.sequence)

    def nbytes(self, mesh: MeshShape, itemsize: int, tokens: int, micro_batches: int = 1) -> dict[str, dict[str, int]]:
        """Return by axis and collective the bytes that one rank sends for ``tokens`` tokens in each micro-batch."""
        found: dict[str, Counter[str]] = {}
        for verb, (axis,), features in (each for unit in self.sent for each in unit):
            sent = ring_bytes(verb, tokens * features * itemsize, mesh.size((axis,)))
            found.setdefault(axis, Counter())[verb] += micro_batches * sent
        return {axis: dict(verbs) for axis, verbs in found.items()}

    def seconds(self, cluster: Cluster, mesh: MeshShape, plan: Plan, tokens: int) -> tuple[float, ...]:
        """Return by unit the seconds of its collectives for ``tokens`` tokens of a rank, forward and backward together.

        Compute waits for all of them.
        """
        itemsize = plan.precision.parameter_of(torch.float32).itemsize
        known: dict[tuple[str, Axes, int], float] = {}
        for each in {each for unit in self.sent for each in unit}:
            verb, axes, features = each
            known[each] = collective_s(cluster, mesh, verb, axes, tokens * features * itemsize)
        return tuple(sum(known[each] for each in unit) for unit in self.sent)


@lru_cache(maxsize=64)
def _build_layer_traffic(model: ModelShape, tensor: int, sequence: int) -> LayerTraffic:
    if tensor == sequence == 1:
        return LayerTraffic(((),) * len(model.units))
    if tensor > 1 and not model.mode:
        raise ConfigError(
            f"{model.name} over {tensor} tensor ranks",
            expected="a model whose layers are divided over them",
            got="one whose layers are whole",
            do="Divide it first: npuzero.planner.model_work.axes.divide_model_shape(model, ranks).",
        )
    module = _get_divisible_module(model, SEQUENCE, sequence)
    names = [spec.name for spec in discover_units(module)]
    sent: list[list[tuple[str, Axes, int]]] = [[] for _ in model.units]
    for path, verb, axes, features in _iter_axis_collectives(module, tensor, sequence, MODES[model.mode or "mtp"]):
        sent[_find_unit_index(path, names)].append((verb, axes, features))
    return LayerTraffic(tuple(map(tuple, sent)))


def _iter_axis_collectives(
    module: nn.Module, tensor: int, sequence: int, mode: ActivationMode
) -> Iterator[tuple[str, str, Axes, int]]:
    if tensor > 1:
        division = build_tensor_division(module, None, tensor, mode.sliced)
        yield from ((path, verb, (TENSOR,), n) for path, verb, n in iter_region_collectives(module, division, mode))
    if sequence > 1:
        swaps = iter_attention_swaps(module, tensor, sequence)
        yield from ((path, verb, (SEQUENCE,), n) for path, verb, n in swaps)


def _find_unit_index(path: str, names: Sequence[str]) -> int:
    """Return the index of the innermost unit that contains the module at ``path``; the root's is 0."""
    inside = [i for i, name in enumerate(names) if i and f"{path}.".startswith(f"{name}.")]
    return max(inside, key=lambda i: len(names[i]), default=0)


def iter_region_collectives(
    module: nn.Module, division: TensorDivision, mode: ActivationMode
) -> Iterator[tuple[str, str, int]]:
    """Yield the collectives of one forward and backward: the module, the verb, and the features per token.

    The collectives are implemented in :mod:`npuzero.parallel.tensor_parallel.collectives_around`.
    """
    # Layers that read the same input share its collective: one per distinct width, not one per layer.
    for around, paths in division.regions.items():
        for sliced, features in {(division.in_stack(path), get_linear(module, path).in_features) for path in paths}:
            verbs = ("all_gather", "reduce_scatter") if sliced else ("all_reduce",)
            for verb in (*verbs, *["all_gather"] * (sliced and mode.thrifty)):
                yield around, verb, features
        for path in paths:
            if division.words[path].whole:
                yield path, "all_gather", get_linear(module, path).out_features
    for path in division.of(RuleKind.ROWS):
        linear = get_linear(module, path)
        verbs = ("reduce_scatter", "all_gather") if division.in_stack(path) else ("all_reduce",)
        yield from ((path, verb, linear.out_features) for verb in verbs)
        if division.words[path].whole:
            yield path, "all_gather", linear.in_features
    for path in division.of(RuleKind.VOCABULARY):
        yield path, "all_reduce", module.get_parameter(f"{path}.weight").shape[1]
    if division.stack is not None:  # to slices before the first block, unsharded after the last
        width = next(
            get_linear(module, path).in_features for path in division.of(RuleKind.COLUMNS) if division.in_stack(path)
        )
        yield from (("", "all_gather", width) for _ in range(2))


def iter_attention_swaps(module: nn.Module, tensor: int, ranks: int) -> Iterator[tuple[str, str, int]]:
    """Yield the all-to-alls of :mod:`npuzero.parallel.sequence_parallel.slices` in one forward and backward.

    The format is that of :func:`iter_region_collectives`.
    """
    for path, each in module.named_modules():
        queries, keys = (count // tensor for count in head_counts(each))
        if queries and head_size(each):
            check_sequence_heads(f"--sequence {ranks}: {path}", queries, ranks)
            repeated = keys * (ranks // math.gcd(keys, ranks))
            for heads in (queries, repeated, repeated, queries) * 2:
                yield path, "all_to_all", heads * head_size(each)


def divide_workload(work: ModelWorkload, model: ModelShape, mesh: MeshShape) -> ModelWorkload:
    """Return the work of one of the tensor and sequence ranks.

    Both divide products. Of element-wise work, tensor ranks divide the part between their layers, as for activations
    (Korthikanti et al., arXiv:2205.05198, equation 2: 24 of 34 bytes), sequence ranks all of it.
    """
    t, q = mesh.tensor, mesh.sequence
    if t == q == 1:
        return work

    def here(index: int, unit: UnitWork) -> UnitWork:
        cut = any(parameter.cut is not None for parameter in model.units[index])
        parts, share = (t if cut else 1) * q, ((10 + 24 / t) / 34 if cut and index else 1.0) / q
        return replace(
            unit,
            flops=unit.flops / parts,
            forward_bytes=int(unit.forward_bytes * share),
            backward_bytes=int(unit.backward_bytes * share),
        )

    return replace(work, units=tuple(here(i, unit) for i, unit in enumerate(work.units)))


@lru_cache(maxsize=64)
def slowest_stage_shape(model: ModelShape, ranks: int) -> ModelShape:
    """Return the slowest stage of a pipeline: the largest number of blocks of any stage, and all parts outside blocks.

    Raises:
        ConfigError: fewer blocks than stages, or tiles.
    """
    blocks = len(model.units) - 1
    if ranks == 1:
        return model
    if blocks < ranks or model.spans:
        raise ConfigError(
            f"{model.name} over {ranks} stages",
            expected="a block for each stage, in one piece",
            got=f"{blocks} blocks" + (", tiles" if model.spans else ""),
            do="Take fewer stages.",
        )
    return replace(model, units=model.units[: 1 + -(-blocks // ranks)])


def stage_exchange_s(cluster: Cluster, mesh: MeshShape, plan: Plan, tokens: int, width: int) -> float:
    """Return the seconds to send a micro-batch's activations from one stage to the next."""
    itemsize = plan.precision.parameter_of(torch.float32).itemsize
    return collective_s(cluster, mesh, "send", (PIPE,), tokens * width * itemsize) if mesh.pipe > 1 else 0.0
