"""What one rank holds and sends in a step, by the table's arithmetic."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from npuzero.plan.mesh import MeshShape, ring_bytes
from npuzero.plan.placement import Axes, Memory, axes_between, axes_beyond
from npuzero.plan.presets import Plan
from npuzero.plan.report import VERBS, Report

#: Numbers that each step's vote carries beside those of the parameters, a bit each, so that ranks find out where they
#: follow different rules.
DIGEST_BITS = 32


@dataclass(frozen=True)
class FlatSize:
    """What the arithmetic needs to know of one flat buffer.

    Attributes:
        unit: index of its unit in order of execution; the root unit is 0, since it spans the others.
        numel: padded elements.
        dtype: of the parameters.
        trainable: frozen flats have neither gradients nor states.
    """

    unit: int
    numel: int
    dtype: torch.dtype
    trainable: bool = True


def predict_bytes(  # noqa: PLR0913 - what a step depends on, by name
    plan: Plan,
    flats: Sequence[FlatSize],
    mesh: MeshShape,
    *,
    trainable_parameters: int,
    micro_batches: int = 1,
    prefetch: int = 1,
    overlaps_gradients: bool = True,
    overlaps_parameters: bool = True,
    clip: bool = False,
    moments: int = 2,
) -> Report:
    """What one rank holds and sends in one steady step: the table's arithmetic.

    Args:
        plan, flats, mesh: the row, the model, the ranks.
        trainable_parameters: number of trainable parameter tensors (the control traffic carries one float each,
            and some for what the ranks must have in common).
        micro_batches: forward and backward passes a step, none of them under ``no_sync``.
        prefetch: units gathered ahead, where parameters overlap.
        overlaps_gradients: whether reductions run beside backward (two wires in flight instead of one).
        overlaps_parameters: whether gathers run beside compute.
        clip: whether the gradient norm is taken once a step.
        moments: state tensors per parameter beside the master (Adam: 2, with amsgrad 3).
    """
    sent = dict.fromkeys(VERBS, 0)
    held = dict.fromkeys(("parameters", "gradients", "states"), 0)
    cut = {part: mesh.size(getattr(plan, part).axes) for part in ("parameters", "held", "gradients", "states")}
    for flat in flats:
        _add_sent(sent, flat, plan, mesh, micro_batches)
        item = flat.dtype.itemsize
        held["parameters"] += flat.numel * item // cut["parameters"]
        if flat.trainable:
            held["gradients"] += flat.numel * 4 // cut["gradients"]
            shard = flat.numel // cut["states"]
            held["states"] += moments * plan.precision.moment_bytes(shard)
            held["states"] += shard * plan.precision.master_bytes(flat.dtype)
    # Beside the parameters: whether a program dropped gradients, or wrote into parameters, and a digest of the rules.
    votes = trainable_parameters + 2 + DIGEST_BITS if trainable_parameters else 0
    sent["control"] = ring_bytes("all_reduce", 4 * votes, mesh.world)
    if clip:
        sent["control"] += ring_bytes("all_reduce", 2 * torch.float64.itemsize, cut["states"])
    wires = 2 if overlaps_gradients else 1
    passing = micro_batches == 1 and cut["gradients"] == 1  # one pass a step: its gradients are sent as they come
    held["buffers"] = _buffers(
        flats, plan, mesh, cut, prefetch if overlaps_parameters else 0, wires, boundary_wires=wires if passing else 1
    )
    return Report({Memory.DEVICE: held}, sent, plan, mesh.world)


def _add_sent(sent: dict[str, int], flat: FlatSize, plan: Plan, mesh: MeshShape, micro_batches: int) -> None:
    def add(verb: str, numel: int, dtype: torch.dtype, axes: Axes, times: int = 1) -> None:
        sent[verb] += times * ring_bytes(verb, numel * dtype.itemsize, mesh.size(axes))

    n, kept = flat.numel, flat.dtype
    wire, sums = plan.precision.wire_of(kept), plan.precision.sums_of(kept)
    parameters, held, gradients, states = (
        getattr(plan, part).axes for part in ("parameters", "held", "gradients", "states")
    )
    add("all_gather", n, kept, parameters, micro_batches)
    if mesh.size(parameters) > 1:
        add("all_gather", n, kept, held, micro_batches)
    if not flat.trainable:
        return
    add("reduce_scatter", n, wire, gradients, micro_batches)
    add("reduce_scatter", n // mesh.size(gradients), wire, axes_between(states, gradients))
    shard, beyond = n // mesh.size(states), axes_beyond(states)
    if sums == wire:
        add("all_reduce", shard, wire, beyond)
    else:  # a sum of low-precision wires is kept in float32: scattered as wires, gathered as sums
        add("reduce_scatter", shard, wire, beyond)
        add("all_gather", shard, sums, beyond)
    add("all_gather", n // mesh.size(parameters), kept, axes_between(states, parameters))


def _buffers(
    flats: Sequence[FlatSize],
    plan: Plan,
    mesh: MeshShape,
    cut: dict[str, int],
    prefetch: int,
    wires: int,
    boundary_wires: int,
) -> int:
    """High water of gathered units, held copies and wires; the root unit (0) spans the others.

    ``wires``, ``boundary_wires``: how many are lent at a time for R2, and for R3's first collective.
    """
    units = max((flat.unit for flat in flats), default=-1) + 1
    whole, kept = [0] * units, [0] * units
    # In the order of reduction: the wires of R2, and of the one or two collectives of R3.
    wire, deeper, beyond = [], [], []
    goes_deeper = mesh.size(axes_between(plan.states.axes, plan.gradients.axes)) > 1
    goes_beyond = mesh.size(axes_beyond(plan.states.axes)) > 1
    for flat in sorted(flats, key=lambda flat: -flat.unit):
        dtype = plan.precision.wire_of(flat.dtype)
        nbytes = flat.numel * dtype.itemsize
        if cut["parameters"] > 1:
            gathered_bytes = flat.numel * flat.dtype.itemsize
            whole[flat.unit] += gathered_bytes
            kept[flat.unit] += gathered_bytes // cut["held"] if cut["held"] < cut["parameters"] else 0
        if flat.trainable and cut["gradients"] > 1:
            wire.append(nbytes)
        if flat.trainable and dtype != torch.float32:  # float32 sums are their own wires
            deeper.append(nbytes // cut["gradients"] if goes_deeper else 0)
            beyond.append(nbytes // cut["states"] if goes_beyond else 0)
    gathered = sum(kept)
    if cut["held"] > 1:  # else all is kept whole until backward, and nothing is gathered beyond that
        gathered += sum(whole[:1]) + _window(whole[1:], 1 + prefetch)
    # A wire that was lent stays in the pool for its size; R3 has one at a time of what it makes itself.
    first, second = (deeper, beyond) if goes_deeper else (beyond, deeper)
    return gathered + _pooled(wire, wires) + _pooled(first, boundary_wires) + _pooled(second, 1)


def _pooled(sizes: Sequence[int], width: int) -> int:
    """What a pool by size ends up with when up to ``width`` neighbours are lent at a time."""
    windows = [sizes[i : i + width] for i in range(len(sizes))]
    return sum(size * max(window.count(size) for window in windows) for size in set(sizes))


def _window(sizes: Sequence[int], width: int) -> int:
    """Largest sum of ``width`` neighbours."""
    return max((sum(sizes[i : i + width]) for i in range(len(sizes))), default=0)
