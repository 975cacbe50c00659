"""Sizes of flat parameters, and the buffers and collectives that all flat parameters of one kind share."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch

from npuzero.plan.presets import Plan
from npuzero.plan.sizes.memory_tiers import device_shard_numel
from npuzero.plan.table.mesh_shape import MeshShape
from npuzero.plan.table.placement import Axes, Memory, Placement
from npuzero.plan.table.step_moves import CollectivePurpose, PlannedCollective, StepBuffer
from npuzero.plan.table.wire import WireLevel, levels_beyond, levels_of, residual_numels, thin_message_bytes


@dataclass(frozen=True)
class FlatSize:
    """Describe the size of one flat parameter.

    Attributes:
        unit: index of its unit in order of execution; the root unit is 0, since all others are nested in it.
        numel: elements, with padding.
        dtype: dtype of the parameters.
        trainable: frozen flat parameters have neither gradients nor states.
        plan: its plan; None: the model's.
    """

    unit: int
    numel: int
    dtype: torch.dtype
    trainable: bool = True
    plan: Plan | None = None


@dataclass(frozen=True)
class HeldParameters:
    """Describe how much of a flat parameter stays on the device while its unit waits to compute.

    Attributes:
        more: whether it is more than the shard stored between steps.
        axes: axes it is sharded over, and gathered over; if ``more`` is false, the axes of the stored parameters.
        copy: its buffer; None if ``more`` is false, or if the parameters stay unsharded.
    """

    more: bool
    axes: Axes
    copy: StepBuffer | None

    @property
    def all(self) -> bool:
        """Tell whether parameters stay unsharded."""
        return self.more and self.copy is None


@dataclass(frozen=True)
class ReductionLevels:
    """Hold the collectives that sum gradients, level by level.

    Attributes:
        scatter: R2.
        deepen: R3's reduce-scatter over the axes that shard states further.
        spread: R3's sum over the axes that replicate states.
        residuals: elements of stored rounding errors (error feedback).
    """

    scatter: tuple[WireLevel, ...]
    deepen: tuple[WireLevel, ...]
    spread: tuple[WireLevel, ...]
    residuals: int

    @property
    def first(self) -> Axes:
        """Return the axes of the first collective; its ranks read the communication buffer in place."""
        return next((level.axes for level in (*self.scatter, *self.deepen, *self.spread)), ())


@dataclass(frozen=True)
class FlatKind:
    """Describe equal flat parameters: length, dtype, plan, and the buffers and collectives that follow from these."""

    numel: int
    dtype: torch.dtype
    trainable: bool
    plan: Plan
    mesh: MeshShape

    @staticmethod
    def of(flat: FlatSize, plan: Plan, mesh: MeshShape) -> FlatKind:
        """Return the kind of ``flat`` in a model under ``plan``."""
        return FlatKind(flat.numel, flat.dtype, flat.trainable, flat.plan or plan, mesh)

    def shard(self, placement: Placement) -> int:
        """Return the elements of one shard under ``placement``."""
        return self.numel // self.mesh.size(placement.axes)

    def many(self, axes: Axes) -> bool:
        """Tell whether a group over ``axes`` has several ranks, so that a collective does something."""
        return self.mesh.size(axes) > 1

    @cached_property
    def apart(self) -> bool:
        """Tell whether unsharded parameters need a separate buffer, allocated and freed as units compute."""
        return self.many(self.plan.parameters.axes) or self.plan.parameters.far

    @cached_property
    def after_forward(self) -> HeldParameters:
        """Return the parameters kept between forward and backward."""
        return _find_held_parameters(self, self.plan.held_after_forward)

    @cached_property
    def between(self) -> HeldParameters:
        """Return the parameters kept between backward and the next micro-batch's forward."""
        return _find_held_parameters(self, self.plan.held_between)

    @cached_property
    def rests(self) -> HeldParameters:
        """Return the parameters kept between steps: the stored shard only."""
        return _find_held_parameters(self, self.plan.parameters)

    @cached_property
    def whole(self) -> StepBuffer:
        return StepBuffer(Memory.DEVICE, "buffers", self.numel, self.dtype)

    @cached_property
    def near(self) -> int:
        """Return the elements of this rank's states on the device."""
        return device_shard_numel(self.plan.states, self.shard(self.plan.states))

    @cached_property
    def far(self) -> int:
        """Return the elements of this rank's states that are offloaded."""
        return self.shard(self.plan.states) - self.near

    @cached_property
    def gradient(self) -> StepBuffer:
        """Return the buffer of gradients on the device: their storage, or the accumulator before they are offloaded."""
        return StepBuffer(Memory.DEVICE, "gradients", self.shard(self.plan.gradients), torch.float32)

    @cached_property
    def homed(self) -> bool:
        """Tell whether gradients are stored on the host."""
        return self.plan.gradients.far

    @cached_property
    def wire(self) -> torch.dtype:
        return self.plan.precision.wire_of(self.dtype)

    @cached_property
    def has_boundary(self) -> bool:
        """Tell whether R3 does anything."""
        return self.many(self.plan.deeper) or self.many(self.plan.beyond)

    @cached_property
    def scattered(self) -> bool:
        """Tell whether R2 does anything."""
        return self.many(self.plan.gradients.axes)

    @cached_property
    def may_pass(self) -> bool:
        """Tell whether R3 can send the gradients of a step's only pass directly, without a float32 accumulator."""
        return self.has_boundary and not self.scattered and self.wire != torch.float32

    def collective(
        self, purpose: CollectivePurpose, unit: int, verb: str, axes: Axes, numel: int, dtype: torch.dtype
    ) -> PlannedCollective:
        """Return the collective ``verb`` over ``axes`` with ``numel`` elements in its unsharded buffer."""
        return PlannedCollective(purpose, unit, verb, axes, self.mesh.size(axes), numel * dtype.itemsize)

    @cached_property
    def levels(self) -> ReductionLevels:
        """Return the collectives that sum gradients."""
        plan, size = self.plan, self.mesh.size
        scatter = levels_of(plan.precision, plan.gradients.axes, size)
        deepen = levels_of(plan.precision, plan.deeper, size)
        spread = levels_beyond(plan.precision, plan.beyond, size)
        sent = (self.numel, self.shard(plan.gradients), self.shard(plan.states))
        kept = (residual_numels(numel, each, size) for numel, each in zip(sent, (scatter, deepen, spread), strict=True))
        return ReductionLevels(scatter, deepen, spread, sum(map(sum, kept)))

    def lent(self, numel: int, dtype: torch.dtype | None = None) -> StepBuffer:
        """Return a pooled communication buffer, in the communication dtype unless another is given."""
        return StepBuffer(Memory.DEVICE, "buffers", numel, dtype or self.wire, ("reduce", self.levels.first))

    def codes(self, channel: str, axes: Axes, numel: int, bits: int) -> StepBuffer:
        """Return a pooled buffer for ``numel`` quantized elements, in one message per rank of ``axes``."""
        ranks = self.mesh.size(axes)
        nbytes = ranks * thin_message_bytes(numel // ranks, bits)
        return StepBuffer(Memory.DEVICE, "buffers", nbytes, torch.uint8, (channel, axes))


def _find_held_parameters(kind: FlatKind, placement: Placement) -> HeldParameters:
    """Return the parameters of a flat parameter that ``placement`` keeps on the device."""
    resting, mesh = kind.plan.parameters, kind.mesh
    more = not placement.far if resting.far else mesh.size(placement.axes) < mesh.size(resting.axes)
    copied = more and kind.many(placement.axes)
    copy = StepBuffer(Memory.DEVICE, "buffers", kind.shard(placement), kind.dtype) if copied else None
    return HeldParameters(more, placement.axes if more else resting.axes, copy)
