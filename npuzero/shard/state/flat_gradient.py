"""The gradient of one flat: where it accumulates on this rank, how much of it is there, and its state.

Names, for a flat of n elements whose gradients and states are sharded into G and S shards::

    buffer    [n/G]  float32; accumulates over micro-batches; no bytes after zero_grad()
    home      [n/G]  float32, on the host, where the plan lets gradients rest there: between passes, and at the update,
                     what the buffer had; the buffer has no bytes then
    unsynced  [n]    float32; what accumulates under no_sync where G > 1
    carry     [n/S]  float32; an already reduced gradient that further micro-batches are added to (rare)
    wire      [n]    communication dtype; the communication buffer: what a reduction sends
    own       [n/S]  this rank's states shard of the buffer, or of the home: the gradient that the update reads
    residual  [n] or a shard of it, float32; what rounding has lost of a thin wire, added the next time (one per thin
                     collective, and only where the precision says so); it stays from step to step
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
    """Name where this rank's gradients of one slot are, since the last reset."""

    NOWHERE = "nowhere"  # none has come
    ALONE = "alone"  # in the unsharded gradients that this rank adds up alone: the buffer where G = 1, else unsynced
    SUMMED = "summed"  # in what the ranks have summed: the sharded buffer, or the carry


class FlatGradient:
    """Hold the gradient of one flat.

    Attributes:
        rests, layout: of the flat.
        wire, sums: communication dtypes of gradients, and of finished sums of them.
        scale: what gradients are multiplied by as they are packed: 1 / the ranks that they are averaged over, so that
            every reduction is a plain sum.
        meets_at_boundary: whether R3 has any collective.
        meets_in_pass: whether that may run beside the step's last pass. Not where both ends of a pipeline take part:
            one has its last pass done before the other, which needs what it sends behind that.
        kept: the buffer, the home, and which of them has what there is.
        memory: the memory of the buffer.
        contribution: what the present backward pass has brought.
        content: per slot.
        zeroed: slots whose gradient the program has set to zeros, while the buffers still have the values of before.
        residuals: by collective.
        pool: lends what the first collective sends, and all that is summed on the way.
        pools: lend codes for a thin wire, by collective.
        summing: whether the sharded buffer has anything of this step; if not, the next reduction overwrites it.
        markers: per slot, what ``p.grad`` is while the gradient lives here.
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
        self.pool: BufferPool  # the reducer's, as the others
        self.pools: dict[LevelTransfer, BufferPool] = {}
        self.markers: list[guard.GradientMarker] = []
        self._parameters: Sequence[nn.Parameter] = ()

    @property
    def own(self) -> Tensor:
        return self.kept.own

    def mark(self, parameters: Sequence[nn.Parameter]) -> None:
        """Make the markers of ``parameters``, one per slot."""
        self._parameters = parameters
        of = weakref.ref(self)
        self.markers = [guard.GradientMarker(p, partial(_mark_zeroed, of, i)) for i, p in enumerate(parameters)]

    def move(self, to: GradientState) -> None:
        """Change the state, as the life-cycle allows; where nothing was, and gradients rest here, there is memory."""
        self.state = check_transition(f"gradients of {self.name}", self.state, to)
        if not self.kept.homes:
            self.kept.take()

    def forget(self) -> None:
        """Drop the gradients of all slots: those that are there still are zeros."""
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
        """Return the way of a pass's complete contribution, by the table of moves."""
        if kind is BackwardRole.ALONE:
            return GradientRoute.KEEP
        if self.cut:  # R2 sends it, and what no_sync has kept goes along
            return GradientRoute.SEND if self.unsynced is None else GradientRoute.BOTH
        # R2 is the identity. The first gradients of a step that are known to be the last are sent as they come, where
        # accumulating them in float32 would only be undone by the communication dtype.
        alone = kind is BackwardRole.LAST and self.meets_in_pass and self.wire != torch.float32
        return GradientRoute.SEND if alone and GradientContent.ALONE not in self.content else GradientRoute.KEEP

    def take(self, kind: BackwardRole) -> Tensor | None:
        """Take in the contribution, which is complete; return the communication buffer to send, if there is one."""
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
        """Add to the unsharded float32 gradients: the plan keeps them so, or ``no_sync`` does for now."""
        if self.cut and self.unsynced is None:
            self.unsynced = self._space.allocate(self.layout.numel, torch.float32, "buffers")
        if self.unsynced is None:
            self.kept.bring()
        whole = self.unsynced if self.unsynced is not None else self.buffer
        arrived = self.contribution.arrived
        if GradientContent.ALONE not in self.content:
            self.contribution.pack(arrived, whole, self.scale, accumulate=False)
            return
        # Slots that have a gradient are added to, the others overwritten: what they hold has not been zeroed.
        for again in (False, True):
            chosen = {
                i: gradient for i, gradient in arrived.items() if (self.content[i] is GradientContent.ALONE) is again
            }
            self.contribution.pack(chosen, whole, self.scale, accumulate=again)

    def fill_wire(self) -> Tensor:
        """Return a communication buffer with this rank's contribution; absent slots and gaps are zero."""
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
        """Zero those slots of unsharded gradients ([n], this rank's alone) of which nothing is there."""
        if self.content.count(GradientContent.ALONE) == len(self.content):
            return
        for slot, content in zip(self.layout.slots, self.content, strict=True):
            if content is not GradientContent.ALONE:
                whole[slot.begin : slot.end].zero_()

    def reopen(self) -> None:
        """Prepare for more gradients: what is READY is no longer all there is.

        Where a reduction at the boundary made it, it is set aside, to be added once these are reduced.

        Raises:
            StateError: the update has begun with it.
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
        """Add what was set aside, if anything was, to the sum that is finished."""
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

    # -- what the program sees -------------------------------------------------------------------------------------

    def present(self) -> list[bool]:
        """Return per slot whether there is a gradient for this rank's user. (Under DisableTorchFunctionSubclass.)

        Raises:
            StateError: somebody else put a gradient there.
        """
        found = [parameter.grad for parameter in self._parameters]
        # Nearly always all or none, and asked several times a step.
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
        """Give slot ``i`` another rank's gradient: as under DDP, if one rank has one all have."""
        self.content[i] = GradientContent.SUMMED
        self._parameters[i].grad = self.markers[i]

    def dropped(self, present: Sequence[bool]) -> list[int]:
        """Return the slots of which something is here that the program has dropped (``p.grad = None``) or set to zeros
        since.
        """
        if not self.zeroed and (
            False not in present or self.content.count(GradientContent.NOWHERE) == len(self.content)
        ):
            return []
        left_out = (i for i, here in enumerate(present) if not here and self.content[i] is not GradientContent.NOWHERE)
        return sorted({*self.zeroed, *left_out})

    def clear(self, i: int) -> None:
        """Zero whatever the buffers hold of slot ``i``."""
        _check_not_lent(self, f"that of {self.layout.slots[i].name} dropped")
        self.content[i] = GradientContent.NOWHERE
        self.zeroed.discard(i)
        slot = self.layout.slots[i]
        for buffer, rest in ((self.kept.values, self.rests.gradients), (self.carry, self.rests.states)):
            if buffer is not None:
                begin, end = intersect_ranges((slot.begin, slot.end), rest.range)
                buffer[begin - rest.begin : end - rest.begin].zero_()


def has_gradient_values(gradient: FlatGradient, present: Sequence[bool]) -> bool:
    """Tell whether any slot that is ``present`` has a gradient that is not known to be zeros."""
    return any(
        here and content is not GradientContent.NOWHERE and i not in gradient.zeroed
        for i, (here, content) in enumerate(zip(present, gradient.content, strict=True))
    )


def drop_rounding_errors(gradient: FlatGradient) -> None:
    """Drop what rounding has lost so far: others are loaded than the parameters that it was at."""
    for residual in gradient.residuals.values():
        residual.zero_()


def _check_not_lent(gradient: FlatGradient, got: str) -> None:
    """Raise where a gradient would change that an update has begun with."""
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
