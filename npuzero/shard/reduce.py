"""R2 and R3: gradients leave autograd, are summed over the ranks, and end as this rank's shard.

Gradients are scaled by 1/D as they are packed, so every reduction is a plain sum (an averaging collective is slower or
missing on some backends, and one of them scales its input in place).

A flat is reduced as soon as all its gradients are there, in one order of the flats that all ranks share, whatever order
autograd produced the gradients in: a flat of which this rank used nothing contributes zeros at its turn. A reduction is
a generator that pauses while its collective is under way, since a two-level reduction's second collective needs the
first one's result. Each launch first moves every earlier reduction one step on: an order that depends on nothing but
the launches.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence

import torch
from torch import Tensor

from npuzero import observe, ops
from npuzero.comm import Communicator, Handle
from npuzero.errors import ConfigError
from npuzero.memory import Pool, Space
from npuzero.ops.pack import pack_unchecked
from npuzero.ops.storage.lazy import settled
from npuzero.plan import Axes, Plan, axes_between, axes_beyond
from npuzero.shard.counting import CountingMesh
from npuzero.shard.unit import Flat, GradientState, Unit

_S = GradientState


class Reducer:
    """Takes gradients as they leave autograd and brings them to READY.

    Attributes:
        synchronizing: whether this backward pass reduces at all (not under ``no_sync``).
        at_boundary: whether it is known to be the step's last, so that R3 can overlap with it.
    """

    def __init__(self, units: Sequence[Unit], plan: Plan, mesh: CountingMesh, space: Space, overlapped: bool) -> None:
        # Backward runs through the blocks in reverse; the root's gradients begin first and end last.
        self._order = [flat for unit in (*reversed(units[1:]), units[0]) for flat in reversed(unit.trainable)]
        self._mesh = mesh
        self._space = space
        self._overlapped = overlapped
        self._scale = 1.0 / mesh.shape.world
        self._gradients = plan.gradients.axes
        self._deeper = axes_between(plan.states.axes, plan.gradients.axes)
        self._beyond = axes_beyond(plan.states.axes)
        self._cut = self._many(self._gradients)
        summed = next((axes for axes in (self._gradients, self._deeper, self._beyond) if self._many(axes)), None)
        self._pool = Pool(space, None if summed is None else self._communicator(summed).buffer)
        self._has_boundary = self._many(self._deeper) or self._many(self._beyond)
        self._active: list[Iterator[None]] = []
        self._turn = 0
        # In this step: is there a gradient that was not reduced, and was there a pass that reduced?
        self._unsynced = self._synced = False
        self.synchronizing = True
        self.at_boundary = False

    def _many(self, axes: Axes) -> bool:
        return self._mesh.size(axes) > 1

    def _communicator(self, axes: Axes) -> Communicator:
        return self._mesh.communicator(axes, "reduce")

    # -- while backward runs ---------------------------------------------------------------------------------------

    def begin(self) -> None:
        """A backward pass starts, or one that raised is forgotten."""
        self._turn = 0
        for flat in self._order:
            flat.pending.clear()

    def arrive(self, flat: Flat, i: int, gradient: Tensor) -> bool:
        """The gradient of slot ``i`` of ``flat`` is final for this pass.

        Returns:
            whether it is the last of its flat.
        """
        if not flat.pending:
            self._reopen(flat)
            flat.move(_S.PARTIAL)
        earlier = flat.pending.get(i)  # of this pass: reentrant checkpointing finishes a parameter once per use
        flat.pending[i] = gradient if earlier is None else earlier + gradient
        if not flat.all_pending:
            return False
        while self._turn < len(self._order) and self._order[self._turn].all_pending:
            self._complete(self._order[self._turn])
            self._turn += 1
        return True

    def end(self) -> None:
        """The backward pass is over: flats of which something was not used take their turn with zeros."""
        for flat in self._order[self._turn :]:
            self._complete(flat)
        self._turn = len(self._order)
        for flat in self._order:  # parameters that autograd finished twice in one pass (reentrant checkpointing)
            if flat.pending:
                self._complete(flat)
        self._unsynced = not self.synchronizing
        self._synced = self._synced or self.synchronizing

    def _complete(self, flat: Flat) -> None:
        """Everything this pass adds to ``flat`` is here: accumulate it, and launch what can be launched."""
        self._reopen(flat)
        for i, gradient in flat.pending.items():
            if gradient.layout is not torch.strided:
                raise _sparse(flat, i, gradient)
            flat.accumulated[i] = True
        wire = None
        boundary = self.synchronizing and self.at_boundary and self._has_boundary
        # The first gradients of a step, and known to be the last: what they would be accumulated in is sent as it is.
        passing = boundary and not self._cut and flat.wire != torch.float32 and not any(flat.local_held)
        if not (self._cut or passing) or not self.synchronizing or flat.unsynced is not None:
            self._accumulate(flat)
        if passing or (self._cut and self.synchronizing):
            wire = self._fill_wire(flat)
        flat.pending.clear()
        if wire is not None or boundary:
            self._launch(flat, wire, boundary)
        else:
            flat.move(_S.ACCUMULATED)

    def _accumulate(self, flat: Flat) -> None:
        """Add to the whole float32 gradients: the plan keeps them whole, or ``no_sync`` does for now."""
        if self._cut and flat.unsynced is None:
            flat.unsynced = self._space.allocate(flat.layout.numel, torch.float32, "buffers")
            flat.local_held = [False] * len(flat.parameters)
        whole = flat.unsynced if flat.unsynced is not None else flat.gradient
        for again in (False, True) if any(flat.local_held) else (False,):
            chosen = {i: gradient for i, gradient in flat.pending.items() if flat.local_held[i] is again}
            self._pack(flat, chosen, whole, accumulate=again)
        for i in flat.pending:
            flat.local_held[i] = True

    def _fill_wire(self, flat: Flat) -> Tensor:
        """A whole wire with this rank's contribution; what is absent is zero, and so are the gaps."""
        wire, gaps_are_zero = self._pool.acquire(flat.layout.numel, flat.wire, flat.layout.gaps)
        if flat.unsynced is not None:
            self._zero_absent(flat, flat.unsynced, flat.local_held)
            ops.cast(flat.unsynced, wire)
            self._drop(flat, "unsynced")
            return wire
        if not gaps_are_zero:
            for begin, end in flat.layout.gaps:
                wire[begin:end].zero_()
        here = [False] * len(flat.parameters)
        for i in flat.pending:
            here[i] = True
        self._zero_absent(flat, wire, here)
        self._pack(flat, flat.pending, wire, accumulate=False)
        return wire

    def _pack(self, flat: Flat, arrived: dict[int, Tensor], wire: Tensor, accumulate: bool) -> None:
        if arrived:
            tensors = [settled(gradient) for gradient in arrived.values()]
            offsets = [flat.layout.slots[i].begin for i in arrived]
            pack_unchecked(tensors, offsets, wire, scale=self._scale, accumulate=accumulate)

    @staticmethod
    def _zero_absent(flat: Flat, whole: Tensor, here: Sequence[bool]) -> None:
        for slot, present in zip(flat.layout.slots, here, strict=True):
            if not present:
                whole[slot.begin : slot.end].zero_()

    def _reopen(self, flat: Flat) -> None:
        """More gradients come: what is reduced is no longer all there is.

        Where a reduction at the boundary made it, it is set aside, to be added once these are reduced.
        """
        if flat.gradient_state is _S.REDUCING:
            self.drain()
        if flat.gradient_state is not _S.READY:
            return
        if self._has_boundary:
            flat.carry = self._space.allocate(flat.own_gradient.numel(), torch.float32, "buffers")
            flat.carry.copy_(flat.own_gradient)
            flat.local_held = [False] * len(flat.parameters)
            flat.valid = False
        flat.move(_S.ACCUMULATED)

    # -- at the step boundary --------------------------------------------------------------------------------------

    def finish(self) -> None:
        """Bring every flat to READY; collective. A rank without a backward pass contributes zeros."""
        self.drain()
        owes = self._cut and (self._unsynced or not self._synced)
        for flat in self._order:
            if flat.gradient_state is not _S.READY:
                self._launch(flat, self._fill_wire(flat) if owes else None, self._has_boundary)
        self.drain()
        self._unsynced = False

    def reset(self) -> None:
        """The step is done with its gradients: forget them."""
        self.drain()
        self._unsynced = self._synced = False
        for flat in self._order:
            flat.forget()
            self._drop(flat, "carry")
            self._drop(flat, "unsynced")

    @property
    def idle(self) -> bool:
        """Whether no reduction is under way."""
        return not self._active

    def drain(self) -> None:
        """Finish every reduction under way."""
        while self._active:
            self._advance()

    def _drop(self, flat: Flat, name: str) -> None:
        buffer = getattr(flat, name)
        if buffer is not None:
            self._space.count("buffers", -buffer.nbytes)
            setattr(flat, name, None)

    # -- reductions ------------------------------------------------------------------------------------------------

    def _launch(self, flat: Flat, wire: Tensor | None, boundary: bool) -> None:
        self._advance()
        flat.move(_S.REDUCING)
        reduction = self._reduction(flat, wire, boundary)
        with observe.span("launch reduction", flat.name):
            if next(reduction, self) is not self:
                self._active.append(reduction)
        if not self._overlapped:
            self.drain()

    def _advance(self) -> None:
        """Move each reduction under way one collective on; waits for the present one."""
        self._active = [reduction for reduction in self._active if next(reduction, self) is not self]

    def _reduction(self, flat: Flat, wire: Tensor | None, boundary: bool) -> Iterator[None]:
        """``wire``: what this pass brings, if it is not accumulated: for R2, or where that is the identity for R3."""
        tag = f"reduce {flat.name}"
        if self._cut and wire is not None:
            communicator = self._communicator(self._gradients)
            yield from _wait(communicator.reduce_scatter(flat.gradient, wire, accumulate=flat.valid, tag=tag))
            flat.valid = True
            self._pool.release(wire, flat.layout.gaps)
            wire = None
        last = boundary or not self._has_boundary
        if last and not self._cut and wire is None:
            self._zero_absent(flat, flat.gradient, flat.local_held)
        elif last and self._cut and not flat.valid:
            flat.gradient.zero_()
        if boundary and self._many(self._deeper):
            yield from self._sum_deeper(flat, wire, tag)
            wire = None
        if boundary and self._many(self._beyond):
            yield from self._sum_beyond(flat, wire, tag)
        if last and flat.carry is not None:
            flat.own_gradient.add_(flat.carry)
            self._drop(flat, "carry")
        flat.move(_S.READY if last else _S.ACCUMULATED)

    def _sum_deeper(self, flat: Flat, wire: Tensor | None, tag: str) -> Iterator[None]:
        """reduce_scatter over states - gradients, from ``wire`` or the accumulator into this rank's own part of it."""
        sent = self._as_wire(flat.gradient, flat.wire) if wire is None else wire
        yield from _wait(self._communicator(self._deeper).reduce_scatter(flat.own_gradient, sent, tag=tag))
        self._return_wire(sent, flat.layout.gaps if wire is not None else None)

    def _sum_beyond(self, flat: Flat, wire: Tensor | None, tag: str) -> Iterator[None]:
        """all_reduce over D - states of this rank's own shard, or of ``wire``.

        Sums in float32 of low-precision wires: reduce_scatter into float32 sums, then all_gather of the sums, so that
        no rank sees the sum rounded (states would drift apart from the presets that keep the sum where it was made).
        """
        communicator = self._communicator(self._beyond)
        gradient = flat.own_gradient
        sent = self._as_wire(gradient, flat.wire) if wire is None else wire
        kind = flat.layout.gaps if wire is not None else None
        if flat.sums == flat.wire:
            yield from _wait(communicator.all_reduce(sent, tag=tag))
            if sent is not gradient:
                ops.cast(sent, gradient)
            self._return_wire(sent, kind)
            return
        part = gradient.chunk(communicator.size)[communicator.rank]
        yield from _wait(communicator.reduce_scatter(part, sent, tag=tag))
        self._return_wire(sent, kind)
        yield from _wait(communicator.all_gather(gradient, part, tag=tag))

    def _as_wire(self, gradient: Tensor, dtype: torch.dtype) -> Tensor:
        """``gradient`` in the wire's dtype: itself where that is float32."""
        if dtype == torch.float32:
            return gradient
        wire, _ = self._pool.acquire(gradient.numel(), dtype)
        ops.cast(gradient, wire)
        return wire

    def _return_wire(self, wire: Tensor, kind: Hashable) -> None:
        if wire.dtype != torch.float32:
            self._pool.release(wire, kind)


def _sparse(flat: Flat, i: int, gradient: Tensor) -> ConfigError:
    """What cannot be packed; shape and dtype are the parameter's, as autograd sees to."""
    return ConfigError(
        f"gradient of {flat.layout.slots[i].name}",
        expected="a dense tensor",
        got=str(gradient.layout),
        do="Use sparse=False: a sharded state is kept and updated densely.",
    )


def _wait(handle: Handle) -> Iterator[None]:
    """Pause while the collective is under way; finish it when resumed."""
    yield
    handle.wait()
