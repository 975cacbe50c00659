"""The table: where a training state is stored, and the bytes and moves that follow from it. Pure data and arithmetic.

A :class:`Plan` has a :class:`Placement` (mesh axes and memory) for parameters, gradients and optimizer states, and one
:class:`Precision`. ZeRO-0/1/2/3 (Rajbhandari et al., 2020), ZeRO-1.5 (InternEvo), HSDP, MiCS and hpZ (ZeRO++, Wang et
al., 2023) are rows of the table; only :meth:`Plan.preset` knows stage numbers. With D = all data axes, a step is:

- R1, before a unit computes: all-gather over the axes of ``parameters``, or of ``after_forward`` or ``between``.
- R2, after a micro-batch's backward: reduce-scatter over ``gradients.axes``, and add to the accumulator.
- R3, at the step: reduce-scatter over states - gradients, all-reduce over D - states.
- R4, after the update: all-gather over states - parameters. A rule without axes does nothing.

In: a plan, the sizes of flat parameters, a mesh, a step's settings. Out: checked plans, a step's moves, a Report.
Read presets.py, table/placement.py and prediction/step_schedule.py first.
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
