"""R2 and R3: gradients leave autograd, are summed over the ranks, and end as this rank's shard.

Gradients are scaled by 1/D as they are packed, so every reduction is a plain sum (an averaging collective is slower or
missing on some backends, and one of them scales its input in place).

Reductions are launched in one order that all ranks share, whatever order autograd produced the gradients in: a unit
whose parameters this rank did not use contributes zeros at its turn. A reduction is a generator that pauses while its
collectives are under way, since a two-level reduction's second collective needs the first one's result. Each launch
first moves every earlier reduction one step on: an order that depends on nothing but the launches.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from npuzero import observe, ops
from npuzero.comm import Communicator, Handle
from npuzero.memory import Pool, Space
from npuzero.plan import Axes, Plan, axes_between, axes_beyond
from npuzero.shard.counting import CountingMesh
from npuzero.shard.unit import Flat, GradientState, Unit

_S = GradientState
_Wires = list[tuple[Flat, Tensor]]


class Reducer:
    """Takes gradients as they leave autograd and brings them to READY.

    Attributes:
        synchronizing: whether this backward pass reduces at all (not under ``no_sync``).
        at_boundary: whether it is known to be the step's last, so that R3 can overlap with it.
    """

    def __init__(self, units: Sequence[Unit], plan: Plan, mesh: CountingMesh, space: Space, overlapped: bool) -> None:
        # Backward runs through the blocks in reverse; the root's gradients begin first and end last.
        self._order = [unit for unit in (*reversed(units[1:]), units[0]) if unit.trainable_count]
        self._mesh = mesh
        self._space = space
        self._pool = Pool(space)
        self._overlapped = overlapped
        self._scale = 1.0 / mesh.shape.world
        self._gradients = plan.gradients.axes
        self._deeper = axes_between(plan.states.axes, plan.gradients.axes)
        self._beyond = axes_beyond(plan.states.axes)
        self._cut = self._many(self._gradients)
        self._has_boundary = self._many(self._deeper) or self._many(self._beyond)
        self._active: list[Iterator[None]] = []
        self._turn = 0
        self._unsynced = False
        self.synchronizing = True
        self.at_boundary = False

    def _many(self, axes: Axes) -> bool:
        return self._mesh.size(axes) > 1

    def _communicator(self, axes: Axes) -> Communicator:
        return self._mesh.communicator(axes, "reduce")

    # -- while backward runs ---------------------------------------------------------------------------------------

    def begin(self) -> None:
        """A backward pass starts."""
        self._turn = 0
        for unit in self._order:
            unit.missing = unit.trainable_count
            unit.pending.clear()

    def arrive(self, unit: Unit, flat: Flat, i: int, gradient: Tensor) -> None:
        """The gradient of slot ``i`` of ``flat`` is final for this pass."""
        self._reopen(unit)
        unit.move(_S.PARTIAL)
        unit.pending.append((flat, i, gradient))
        unit.missing -= 1
        while self._turn < len(self._order) and self._order[self._turn].missing <= 0:
            self._complete(self._order[self._turn])
            self._turn += 1

    def end(self) -> None:
        """The backward pass is over: units of which something was not used take their turn with zeros."""
        for unit in self._order[self._turn :]:
            self._complete(unit)
        self._turn = len(self._order)
        for unit in self._order:  # parameters that autograd finished twice in one pass (reentrant checkpointing)
            if unit.pending:
                self._complete(unit)
        self._unsynced = not self.synchronizing

    def _complete(self, unit: Unit) -> None:
        """Everything this pass adds to ``unit`` is here: accumulate it, and launch what can be launched."""
        self._reopen(unit)
        wires: _Wires = []
        for flat in unit.trainable:
            arrived = [(i, gradient) for owner, i, gradient in unit.pending if owner is flat]
            if not self._cut or not self.synchronizing or flat.unsynced is not None:
                self._accumulate(flat, arrived)
            if self._cut and self.synchronizing:
                wires.append((flat, self._fill_wire(flat, arrived)))
        unit.pending.clear()
        boundary = self.synchronizing and self.at_boundary and self._has_boundary
        if wires or boundary:
            self._launch(unit, wires, boundary)
        else:
            unit.move(_S.ACCUMULATED)

    def _accumulate(self, flat: Flat, arrived: list[tuple[int, Tensor]]) -> None:
        """Add to the whole float32 gradients: the plan keeps them whole, or ``no_sync`` does for now."""
        if self._cut and flat.unsynced is None:
            flat.unsynced = self._space.allocate(flat.layout.numel, torch.float32, "buffers")
            flat.local_held = [False] * len(flat.parameters)
        whole = flat.unsynced if flat.unsynced is not None else flat.gradient
        for again in (False, True):
            chosen = [(i, gradient) for i, gradient in arrived if flat.local_held[i] is again]
            self._pack(flat, chosen, whole, accumulate=again)
        for i, _ in arrived:
            flat.local_held[i] = True

    def _fill_wire(self, flat: Flat, arrived: list[tuple[int, Tensor]]) -> Tensor:
        """A whole wire with this rank's contribution; what is absent is zero, and so are the gaps."""
        wire = self._pool.acquire(flat.layout.numel, flat.dtype, flat.layout.gaps)
        if flat.unsynced is not None:
            self._zero_absent(flat, flat.unsynced, flat.local_held)
            ops.cast(flat.unsynced, wire)
            self._space.count("buffers", -flat.unsynced.nbytes)
            flat.unsynced = None
        else:
            here = [False] * len(flat.parameters)
            for i, _ in arrived:
                here[i] = True
            self._zero_absent(flat, wire, here)
            self._pack(flat, arrived, wire, accumulate=False)
        return wire

    def _pack(self, flat: Flat, arrived: list[tuple[int, Tensor]], wire: Tensor, accumulate: bool) -> None:
        if arrived:
            tensors = [gradient.reshape(-1) for _, gradient in arrived]
            offsets = [flat.layout.slots[i].begin for i, _ in arrived]
            ops.pack(tensors, offsets, wire, scale=self._scale, accumulate=accumulate)

    @staticmethod
    def _zero_absent(flat: Flat, whole: Tensor, here: Sequence[bool]) -> None:
        for slot, present in zip(flat.layout.slots, here, strict=True):
            if not present:
                whole[slot.begin : slot.end].zero_()

    def _reopen(self, unit: Unit) -> None:
        """More gradients come after the boundary: set the reduced ones aside, to be added once these are reduced."""
        if unit.gradient_state not in (_S.READY, _S.REDUCING):
            return
        self.drain()
        if unit.gradient_state is not _S.READY or not self._has_boundary:
            return
        for flat in unit.trainable:
            flat.carry = self._space.allocate(flat.own_gradient.numel(), torch.float32, "buffers")
            flat.carry.copy_(flat.own_gradient)
            flat.local_held = [False] * len(flat.parameters)
            flat.valid = False
        unit.move(_S.PARTIAL)

    # -- at the step boundary --------------------------------------------------------------------------------------

    def finish(self) -> None:
        """Bring every unit to READY; collective."""
        self.drain()
        for unit in self._order:
            if unit.gradient_state is not _S.READY:
                wires = [(f, self._fill_wire(f, [])) for f in unit.trainable] if self._cut and self._unsynced else []
                self._launch(unit, wires, self._has_boundary)
        self.drain()
        self._unsynced = False
        for unit in self._order:
            unit.move(_S.READY)

    def reset(self) -> None:
        """The step is done with its gradients: forget them."""
        self.drain()
        self._unsynced = False
        for unit in self._order:
            unit.pending.clear()
            for flat in unit.trainable:
                flat.valid = False
                flat.local_held = [False] * len(flat.parameters)
                flat.accumulated = [False] * len(flat.parameters)
                flat.kept = [False] * len(flat.parameters)
                for name in ("carry", "unsynced"):
                    buffer = getattr(flat, name)
                    if buffer is not None:
                        self._space.count("buffers", -buffer.nbytes)
                        setattr(flat, name, None)
            unit.gradient_state = _S.EMPTY

    def drain(self) -> None:
        """Finish every reduction under way."""
        while self._active:
            self._advance()

    # -- reductions ------------------------------------------------------------------------------------------------

    def _launch(self, unit: Unit, wires: _Wires, boundary: bool) -> None:
        self._advance()
        unit.move(_S.REDUCING)
        reduction = self._reduction(unit, wires, boundary)
        with observe.span("launch reduction", unit.name):
            if next(reduction, self) is not self:
                self._active.append(reduction)
        if not self._overlapped:
            self.drain()

    def _advance(self) -> None:
        """Move each reduction under way one collective on; waits for the present one."""
        self._active = [reduction for reduction in self._active if next(reduction, self) is not self]

    def _reduction(self, unit: Unit, wires: _Wires, boundary: bool) -> Iterator[None]:
        tag = f"reduce {unit.name}"
        if wires:
            yield from self._scatter([(flat, flat.gradient, wire) for flat, wire in wires], self._gradients, tag)
            for flat, wire in wires:
                flat.valid = True
                self._pool.release(wire, flat.layout.gaps)
        last = boundary or not self._has_boundary
        if last:
            for flat in unit.trainable:
                if not self._cut:
                    self._zero_absent(flat, flat.gradient, flat.local_held)
                elif not flat.valid:
                    flat.gradient.zero_()
        if boundary:
            if self._many(self._deeper):
                yield from self._sum_deeper(unit, tag)
            if self._many(self._beyond):
                yield from self._sum_beyond(unit, tag)
            for flat in unit.trainable:
                if flat.carry is not None:
                    flat.own_gradient.add_(flat.carry)
                    self._space.count("buffers", -flat.carry.nbytes)
                    flat.carry = None
        unit.move(_S.READY if last else _S.ACCUMULATED)

    def _scatter(self, moves: list[tuple[Flat, Tensor, Tensor]], axes: Axes, tag: str) -> Iterator[None]:
        """reduce_scatter each (flat, shard, whole); adds to shards that hold something already."""
        communicator = self._communicator(axes)
        yield from _wait(
            [communicator.reduce_scatter(s, w, accumulate=s is f.gradient and f.valid, tag=tag) for f, s, w in moves]
        )

    def _sum_deeper(self, unit: Unit, tag: str) -> Iterator[None]:
        """reduce_scatter over states - gradients, from the accumulator into this rank's own part of it."""
        wires = [(flat, self._as_wire(flat.gradient, flat.dtype)) for flat in unit.trainable]
        yield from self._scatter([(flat, flat.own_gradient, wire) for flat, wire in wires], self._deeper, tag)
        self._return_wires(wires)

    def _sum_beyond(self, unit: Unit, tag: str) -> Iterator[None]:
        """all_reduce over D - states of this rank's own shard.

        Low-precision wires: reduce_scatter into float32 sums, then all_gather of the sums, so that no rank sees the
        sum rounded (the states would drift apart from the presets that keep the sum where it was made).
        """
        communicator = self._communicator(self._beyond)
        exact = [flat for flat in unit.trainable if flat.dtype == torch.float32]
        rounded = [flat for flat in unit.trainable if flat.dtype != torch.float32]
        handles = [communicator.all_reduce(flat.own_gradient, tag=tag) for flat in exact]
        wires = [(flat, self._as_wire(flat.own_gradient, flat.dtype)) for flat in rounded]
        parts = []
        for flat, wire in wires:
            part = flat.own_gradient.chunk(communicator.size)[communicator.rank]
            parts.append((flat, part))
            handles.append(communicator.reduce_scatter(part, wire, tag=tag))
        yield from _wait(handles)
        self._return_wires(wires)
        if parts:
            yield from _wait([communicator.all_gather(flat.own_gradient, part, tag=tag) for flat, part in parts])

    def _as_wire(self, gradient: Tensor, dtype: torch.dtype) -> Tensor:
        """``gradient`` in the wire's dtype: itself where that is float32."""
        if dtype == torch.float32:
            return gradient
        wire = self._pool.acquire(gradient.numel(), dtype)
        ops.cast(gradient, wire)
        return wire

    def _return_wires(self, wires: _Wires) -> None:
        for _, wire in wires:
            if wire.dtype != torch.float32:
                self._pool.release(wire)


def _wait(handles: list[Handle]) -> Iterator[None]:
    """Pause while ``handles`` are under way; finish them when resumed."""
    yield
    for handle in handles:
        handle.wait()
