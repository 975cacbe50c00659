"""THE TABLE: where each part of a training state rests, and what follows from it by arithmetic.

A training state (parameters, gradients, optimizer states) is described by three facts: over which mesh axes it is
sharded and in which memory it rests (a :class:`Placement` each), and its dtype (one :class:`Precision`).
ZeRO-0/1/2/3 (Rajbhandari et al., 2020), ZeRO-1.5
(InternEvo), HSDP and MiCS, hpZ (ZeRO++, Wang et al., 2023) are values of this one table. A stage number appears in
:meth:`Plan.preset` and nowhere else.

With D = all data axes a step is four rules; each is the identity where its tuple is empty:

====  ==========================================  ==================================================================
rule  when                                        what
====  ==========================================  ==================================================================
R1    before a unit computes                      all_gather over ``parameters.axes`` (backward: ``after_forward``'s)
R2    after a micro-batch's backward              reduce_scatter over ``gradients.axes``, add into the accumulator
R3    at the step boundary                        reduce_scatter over states - gradients, all_reduce over D - states
R4    after the update                            all_gather over states - parameters
====  ==========================================  ==================================================================

What ``after_forward`` and ``between`` keep within a step R1 need not gather again: then its axes are theirs.

This package is pure data and arithmetic: it knows no process group, no module and no device.
"""

from npuzero.plan.prediction.predict import predict_bytes
from npuzero.plan.prediction.report import (
    FROM_DISK,
    LINKS,
    TO_DEVICE,
    TO_DISK,
    TO_HOST,
    VERBS,
    Report,
    Sent,
    sent_by_axis,
    sent_by_verb,
)
from npuzero.plan.prediction.step_schedule import DIGEST_BITS, StepSpec, steady_step
from npuzero.plan.presets import OFFLOADED, OFFLOADS, PRESETS, SEQUENCED, THINNED, Plan
from npuzero.plan.sizes.flat_sizes import FlatSize
from npuzero.plan.sizes.memory_tiers import (
    FAR_CHUNK_BYTES,
    PAGE_BYTES,
    READ_SLOTS,
    RING_SLOTS,
    STATE_ALIGNMENT,
    RingSections,
    TierPart,
    device_shard_numel,
    divide_shards,
    offloaded_block_bytes,
    ring_section_bytes,
    round_up_pages,
)
from npuzero.plan.table.axis_relations import Relation, Relations, axes_with, default_relation
from npuzero.plan.table.mesh_shape import SHARD_BYTES, MeshShape, axis_bytes, divisors, ring_bytes
from npuzero.plan.table.placement import (
    AXES,
    DATA,
    ENDS,
    LOCAL,
    NODE,
    PIPE,
    POD,
    SEQUENCE,
    STAGE,
    TENSOR,
    Axes,
    Memory,
    Placement,
    axes_between,
    axes_beyond,
    axes_over,
)
from npuzero.plan.table.precision import (
    DTYPES,
    MASTERS,
    MATMULS,
    MOMENT_BLOCK,
    MOMENTS,
    PRECISIONS,
    START_ELEMENTS,
    SUMS,
    Precision,
    PrecisionLike,
    parse_precision,
)
from npuzero.plan.table.step_moves import flatten_moves
from npuzero.plan.table.tensor_slices import Cut, CutBlock, TensorPortion
from npuzero.plan.table.wire import WireLevel, levels_beyond, levels_of, residual_numels, thin_message_bytes

__all__ = [
    "AXES",
    "DATA",
    "DIGEST_BITS",
    "DTYPES",
    "ENDS",
    "FAR_CHUNK_BYTES",
    "FROM_DISK",
    "LINKS",
    "LOCAL",
    "MASTERS",
    "MATMULS",
    "MOMENTS",
    "MOMENT_BLOCK",
    "NODE",
    "OFFLOADED",
    "OFFLOADS",
    "PAGE_BYTES",
    "PIPE",
    "POD",
    "PRECISIONS",
    "PRESETS",
    "READ_SLOTS",
    "RING_SLOTS",
    "SEQUENCE",
    "SEQUENCED",
    "SHARD_BYTES",
    "STAGE",
    "START_ELEMENTS",
    "STATE_ALIGNMENT",
    "SUMS",
    "TENSOR",
    "THINNED",
    "TO_DEVICE",
    "TO_DISK",
    "TO_HOST",
    "VERBS",
    "Axes",
    "Cut",
    "CutBlock",
    "FlatSize",
    "Memory",
    "MeshShape",
    "Placement",
    "Plan",
    "Precision",
    "PrecisionLike",
    "Relation",
    "Relations",
    "Report",
    "RingSections",
    "Sent",
    "StepSpec",
    "TensorPortion",
    "TierPart",
    "WireLevel",
    "axes_between",
    "axes_beyond",
    "axes_over",
    "axes_with",
    "axis_bytes",
    "default_relation",
    "device_shard_numel",
    "divide_shards",
    "divisors",
    "flatten_moves",
    "levels_beyond",
    "levels_of",
    "offloaded_block_bytes",
    "parse_precision",
    "predict_bytes",
    "residual_numels",
    "ring_bytes",
    "ring_section_bytes",
    "round_up_pages",
    "sent_by_axis",
    "sent_by_verb",
    "steady_step",
    "thin_message_bytes",
]
