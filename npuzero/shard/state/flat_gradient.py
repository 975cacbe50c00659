"""The gradient of one flat parameter: its buffers on this rank, which slots have arrived, and its state.

Names, for a flat parameter of n elements with gradients in G shards and optimizer states in S shards::

    buffer    [n/G]  float32; accumulates over micro-batches; no bytes after zero_grad()
    home      [n/G]  float32, on the host; only if the plan offloads gradients: holds the buffer's contents between
                     passes and during the update, while the buffer has no bytes
    unsynced  [n]    float32; accumulates under no_sync if G > 1
    carry     [n/S]  float32; an already reduced gradient, to which further micro-batches are added (rare)
    wire      [n]    communication dtype; the communication buffer that a reduction sends
    own       [n/S]  this rank's states shard of the buffer or of the home: the gradient that the update reads
    residual  [n] or a shard, float32; the rounding error of a thin wire, added to the next reduction (one per thin
                     collective, and only if the precision enables feedback); persists across steps
"""

from __future__ import annotations

import enum
import weakref
from collections.abc import Sequence
from functools import partial
from itertools import repeat
from operator import is_

import torch
from torch import Tensor, nn

from npuzero import ops
from npuzero.errors import StateError
from npuzero.memory import BufferPool, MemorySpaces
from npuzero.plan import Memory, Precision
from npuzero.shard.layout.flat_layout import FlatLayout, intersect_ranges
from npuzero.shard.layout.shard_specs import LevelTransfer, ShardSpecs
from npuzero.shard.modules import sharded_tensor as guard
from npuzero.shard.state.gradient_buffer import GradientBuffer
from npuzero.shard.state.life_cycle import GradientState, check_transition
from npuzero.shard.state.micro_batch_gradient import BackwardRole, GradientRoute, MicroBatchGradient


class GradientContent(enum.Enum):
    """Name the buffer that holds this rank's gradient of one slot, since the last reset."""

    NOWHERE = "nowhere"  # no gradient has arrived
    ALONE = "alone"  # in this rank's unsharded, unreduced gradients: the buffer if G = 1, else unsynced
    SUMMED = "summed"  # in the reduced gradients: the sharded buffer, or the carry


class FlatGradient:
    """Hold the gradient of one flat parameter.

    Attributes:
        rests, layout: shard specs and layout of the flat parameter.
        wire, sums: communication dtypes of gradients, and of their finished sums.
        scale: factor applied as gradients are packed: 1 / the number of ranks averaged over, so that every reduction is
            a plain sum.
        meets_at_boundary: whether R3 has any collective.
        meets_in_pass: whether R3 may overlap the step's last backward pass. False if both ends of a pipeline take part:
            one end finishes its last pass first, and the opposite end needs the data sent after that.
        kept: the buffer and the home, one of which holds the present gradient.
        memory: the memory of the buffer.
        contribution: gradients of the present backward pass.
        content: per slot, the buffer that holds the gradient.
        zeroed: slots that the program has set to zero, while the buffers still hold the earlier values.
        residuals: rounding errors, by collective.
        pool: provides the send buffer of the first collective and the buffers of intermediate sums.
        pools: provide code buffers of a thin wire, by collective.
        summing: whether the sharded buffer holds gradients of this step; if not, the next reduction overwrites it.
        markers: per slot, the object that ``p.grad`` is while the engine holds the gradient.
    """

    def __init__(
        self, name: str, layout: FlatLayout, rests: ShardSpecs, precision: Precision, spaces: MemorySpaces
    ) -> None:
        self.name = name
        self.layout = layout
        self.rests = rests
        self.wire, self.sums = precision.wire_of(layout.dtype), precision.sums_of(layout.dtype)
        self.scale = 1.0 / rests.averaged.size
        self.cut = rests.gradients.cut
        self.meets_at_boundary = rests.deeper.many or rests.beyond.many
        self.meets_in_pass = self.meets_at_boundary and not rests.tied
        self._space = spaces[Memory.DEVICE]
        self.kept = GradientBuffer(layout, rests, spaces)
        self.memory, self.buffer = self.kept.memory, self.kept.buffer
        self.residuals = {
            hop: self._space.allocate(hop.residual, torch.float32, "states")
            for hop in (*rests.scatter, *rests.deepen, *rests.spread)
            if hop.residual
        }
        self.unsynced: Tensor | None = None
        self.carry: Tensor | None = None
        self.state = GradientState.EMPTY
        self.contribution = MicroBatchGradient(layout)
        self.content = [GradientContent.NOWHERE] * len(layout.slots)
        self.zeroed: set[int] = set()
        self.summing = False
        self.pool: BufferPool  # set by GradientReducer, as are pools
        self.pools: dict[LevelTransfer, BufferPool] = {}
        self.markers: list[guard.GradientMarker] = []
        self._parameters: Sequence[nn.Parameter] = ()

    @property
    def own(self) -> Tensor:
        return self.kept.own

    def mark(self, parameters: Sequence[nn.Parameter]) -> None:
        """Create the markers of ``parameters``, one per slot."""
        self._parameters = parameters
        of = weakref.ref(self)
        self.markers = [guard.GradientMarker(p, partial(_mark_zeroed, of, i)) for i, p in enumerate(parameters)]

    def move(self, to: GradientState) -> None:
        """Change the state, as the life cycle allows; allocate the buffer if gradients are not offloaded."""
        self.state = check_transition(f"gradients of {self.name}", self.state, to)
        if not self.kept.homes:
            self.kept.take()

    def forget(self) -> None:
        """Drop the gradients of all slots; any that remain visible read as zeros."""
        self.content = [GradientContent.NOWHERE] * len(self.content)
        self.zeroed.clear()
        self.summing = False
        self.kept.forget()
        self.contribution.arrived.clear()
        self._drop_carry()
        self._drop_unsynced()
        self.state = GradientState.EMPTY

    # -- a pass ----------------------------------------------------------------------------------------------------

    def route(self, kind: BackwardRole) -> GradientRoute:
        """Return the route of a pass's complete gradients."""
        if kind is BackwardRole.ALONE:
            return GradientRoute.KEEP
        if self.cut:  # R2 sends it, together with gradients accumulated under no_sync
            return GradientRoute.SEND if self.unsynced is None else GradientRoute.BOTH
        # R2 is the identity. If a step's first gradients are also its last, send them directly: accumulating in float32
        # would be undone by the cast to the communication dtype.
        alone = kind is BackwardRole.LAST and self.meets_in_pass and self.wire != torch.float32
        return GradientRoute.SEND if alone and GradientContent.ALONE not in self.content else GradientRoute.KEEP

    def take(self, kind: BackwardRole) -> Tensor | None:
        """Accept the pass's complete gradients; return the communication buffer to send, if any."""
        route = self.route(kind)
        self.contribution.check()
        if route is not GradientRoute.SEND:
            self._accumulate()
        where = GradientContent.SUMMED if route is GradientRoute.SEND else GradientContent.ALONE
        if self.contribution.complete:
            self.content = [where] * len(self.content)
        else:
            for i in self.contribution.arrived:
                self.content[i] = where
        wire = None if route is GradientRoute.KEEP else self.fill_wire()
        self.contribution.arrived.clear()
        return wire

    def _accumulate(self) -> None:
        """Add to the unsharded float32 gradients: the buffer, or ``unsynced`` under ``no_sync``."""
        if self.cut and self.unsynced is None:
            self.unsynced = self._space.allocate(self.layout.numel, torch.float32, "buffers")
        if self.unsynced is None:
            self.kept.bring()
        whole = self.unsynced if self.unsynced is not None else self.buffer
        arrived = self.contribution.arrived
        if GradientContent.ALONE not in self.content:
            self.contribution.pack(arrived, whole, self.scale, accumulate=False)
            return
        # Accumulate into slots that have a gradient and overwrite the rest, which hold stale values.
        for again in (False, True):
            chosen = {
                i: gradient for i, gradient in arrived.items() if (self.content[i] is GradientContent.ALONE) is again
            }
            self.contribution.pack(chosen, whole, self.scale, accumulate=again)

    def fill_wire(self) -> Tensor:
        """Return a communication buffer with this rank's gradients; absent slots and gaps are zero."""
        wire, gaps_are_zero = self.pool.acquire(self.layout.numel, self.wire, self.layout.gaps)
        if self.unsynced is not None:
            self.zero_absent(self.unsynced)
            ops.cast(self.unsynced, wire)
            self._drop_unsynced()
            self._now_summed()
            return wire
        if not gaps_are_zero:
            for begin, end in self.layout.gaps:
                wire[begin:end].zero_()
        arrived = self.contribution.arrived
        if not self.contribution.complete:
            for i, slot in enumerate(self.layout.slots):
                if i not in arrived:
                    wire[slot.begin : slot.end].zero_()
        self.contribution.pack(arrived, wire, self.scale, accumulate=False)
        return wire

    def zero_absent(self, whole: Tensor) -> None:
        """Zero the slots of ``whole`` (unsharded gradients of this rank alone, [n]) that have no gradient."""
        if self.content.count(GradientContent.ALONE) == len(self.content):
            return
        for slot, content in zip(self.layout.slots, self.content, strict=True):
            if content is not GradientContent.ALONE:
                whole[slot.begin : slot.end].zero_()

    def reopen(self) -> None:
        """Prepare a READY gradient for further micro-batches.

        If R3 has reduced it, copy it to the carry, which is added once the new gradients are reduced.

        Raises:
            StateError: an update already uses it.
        """
        _check_not_lent(self, "another gradient of it, which the update lacks")
        if self.state is not GradientState.READY:
            return
        if self.meets_at_boundary:
            self.carry = self._space.allocate(self.own.numel(), torch.float32, "buffers")
            self.carry.copy_(self.own)
            self._now_summed()
            self.summing = False
        self.move(GradientState.ACCUMULATED)

    def add_carry(self) -> None:
        """Add the carry, if any, to the finished sum."""
        if self.carry is not None:
            self.own.add_(self.carry)
            self._drop_carry()

    def _now_summed(self) -> None:
        alone, summed = GradientContent.ALONE, GradientContent.SUMMED
        self.content = [summed if content is alone else content for content in self.content]

    def _drop_unsynced(self) -> None:
        self._uncount(self.unsynced)
        self.unsynced = None

    def _drop_carry(self) -> None:
        self._uncount(self.carry)
        self.carry = None

    def _uncount(self, buffer: Tensor | None) -> None:
        if buffer is not None:
            self._space.count("buffers", -buffer.nbytes)

    # -- p.grad of the program -------------------------------------------------------------------------------------

    def present(self) -> list[bool]:
        """Return per slot whether ``p.grad`` is set on this rank. Call it under DisableTorchFunctionSubclass.

        Raises:
            StateError: ``p.grad`` is a tensor that the engine did not set.
        """
        found = [parameter.grad for parameter in self._parameters]
        # Nearly always all or none, and called several times a step.
        if all(map(is_, found, self.markers)):
            return [True] * len(found)
        if all(map(is_, found, repeat(None))):
            return [False] * len(found)
        for i, (gradient, marker) in enumerate(zip(found, self.markers, strict=True)):
            if gradient is not None and gradient is not marker:
                raise StateError(
                    f"gradient of {self.layout.slots[i].name}",
                    expected="None, or what the engine put there",
                    got="a tensor set from outside, which no rank would reduce",
                    do="Let backward() make gradients; change them through the loss, or use torch.autograd.grad.",
                )
        return [gradient is not None for gradient in found]

    def adopt(self, i: int) -> None:
        """Mark slot ``i`` as present because another rank has its gradient: as under DDP, then all ranks have it."""
        self.content[i] = GradientContent.SUMMED
        self._parameters[i].grad = self.markers[i]

    def dropped(self, present: Sequence[bool]) -> list[int]:
        """Return the slots that the buffers hold but the program has dropped (``p.grad = None``) or set to zero."""
        if not self.zeroed and (
            False not in present or self.content.count(GradientContent.NOWHERE) == len(self.content)
        ):
            return []
        left_out = (i for i, here in enumerate(present) if not here and self.content[i] is not GradientContent.NOWHERE)
        return sorted({*self.zeroed, *left_out})

    def clear(self, i: int) -> None:
        """Zero slot ``i`` in the buffers."""
        _check_not_lent(self, f"that of {self.layout.slots[i].name} dropped")
        self.content[i] = GradientContent.NOWHERE
        self.zeroed.discard(i)
        slot = self.layout.slots[i]
        for buffer, rest in ((self.kept.values, self.rests.gradients), (self.carry, self.rests.states)):
            if buffer is not None:
                begin, end = intersect_ranges((slot.begin, slot.end), rest.range)
                buffer[begin - rest.begin : end - rest.begin].zero_()


def has_gradient_values(gradient: FlatGradient, present: Sequence[bool]) -> bool:
    """Return whether any ``present`` slot has a gradient that is not known to be zero."""
    return any(
        here and content is not GradientContent.NOWHERE and i not in gradient.zeroed
        for i, (here, content) in enumerate(zip(present, gradient.content, strict=True))
    )


def drop_rounding_errors(gradient: FlatGradient) -> None:
    """Zero the residuals: newly loaded parameters make them obsolete."""
    for residual in gradient.residuals.values():
        residual.zero_()


def _check_not_lent(gradient: FlatGradient, got: str) -> None:
    """Raise a StateError if an early update already uses the gradient, which is about to change."""
    if gradient.kept.lent:
        raise StateError(
            f"gradients of {gradient.name}",
            expected="nothing more after the update of this flat has begun inside backward (early=True)",
            got=got,
            do="Leave early=True out where a checkpointed module (use_reentrant=True) runs several times in a forward, "
            "or where gradients are dropped before step(). Start again from the last checkpoint.",
        )


def _mark_zeroed(gradient_of: weakref.ref[FlatGradient], i: int) -> None:
    gradient = gradient_of()
    if gradient is not None:
        gradient.zeroed.add(i)
