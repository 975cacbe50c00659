"""R2 and R3: reduce-scatter gradients from autograd into this rank's shard.

Gradients are scaled as they are packed, so every reduction is a plain sum (an averaging collective is slower or
missing on some backends, and one of them scales its input in place).

Flat parameters are the buckets: each is reduced as soon as all its gradients have arrived, overlapped with backward.
All ranks reduce in the same order of flats, independent of the order in autograd: a flat that this rank did not use
contributes zeros at its turn.
A reduction is a generator that pauses while a collective runs, since the second collective of a two-level reduction
needs the first one's result. Each launch first advances every earlier reduction by one collective, so the order of
collectives depends only on the order of launches.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence

import torch
from torch import Tensor

from npuzero import observe, ops
from npuzero.device import AsyncHandle, wait_quietly
from npuzero.memory import BufferPool, MemorySpaces
from npuzero.plan import Axes, Memory, thin_message_bytes
from npuzero.shard.layout.shard_specs import LevelTransfer, RankGroup
from npuzero.shard.parameters.model_parts import reduction_order
from npuzero.shard.state.flat_gradient import FlatGradient
from npuzero.shard.state.life_cycle import GradientState
from npuzero.shard.state.micro_batch_gradient import BackwardRole
from npuzero.shard.state.unit import Unit

_S = GradientState


class GradientReducer:
    """Reduce gradients as autograd finishes them, until they are READY.

    Attributes:
        open: whether a backward pass is running in autograd.
        reduced: called with each gradient that is final for the present pass.
    """

    def __init__(self, units: Sequence[Unit], spaces: MemorySpaces, overlapped: bool) -> None:
        self._order = [flat.gradient for unit in reduction_order(units) for flat in reversed(unit.trainable)]
        self._overlapped = overlapped
        self._mover = spaces.mover
        pools = self._pools = dict[Axes, BufferPool]()

        def pool(group: RankGroup | None) -> BufferPool:
            # One pool per group: the ranks of the collective read its buffers in place.
            axes: Axes = () if group is None else group.axes
            if axes not in pools:
                source = None if group is None else group.communicator("reduce").buffer
                pools[axes] = BufferPool(spaces[Memory.DEVICE], source)
            return pools[axes]

        for gradient in self._order:
            rests = gradient.rests
            gradient.pool = pool(rests.summed)
            gradient.pools = {
                hop: pool(hop.group) for hop in (*rests.scatter, *rests.deepen, *rests.spread) if hop.bits
            }
        self._active: list[Iterator[None]] = []
        self._roles: Mapping[FlatGradient, BackwardRole] = {}  # of the present pass
        self._turns: Sequence[FlatGradient] = ()
        self._turn = 0
        self._number = 0  # of the pass
        self._last: dict[FlatGradient, BackwardRole] = {}  # per gradient, its role in the step's last pass so far
        self.open = False
        self.reduced: Callable[[FlatGradient], None] = lambda _: None

    # -- while backward runs ---------------------------------------------------------------------------------------

    def begin(self, roles: Mapping[FlatGradient, BackwardRole]) -> None:
        """Start a backward pass.

        Args:
            roles: role of the pass for each gradient it brings, in the order of reduction.
        """
        self.abandon()
        self._roles, self._turns = roles, list(roles)
        self._number += 1
        self.open = True

    def abandon(self) -> None:
        """Drop the gradients of a pass that raised."""
        self.open = False
        self._turn = 0
        for gradient in self._order:
            gradient.contribution.arrived.clear()

    def arrive(self, gradient: FlatGradient, i: int, value: Tensor) -> bool:
        """Take ``value``, the final gradient of slot ``i`` in this pass, and launch the reductions that are due.

        Returns:
            whether it completes its flat parameter.
        """
        contribution = gradient.contribution
        if not contribution.arrived:
            self._reopen(gradient)
            gradient.move(_S.PARTIAL)
        contribution.add(i, value)
        if not contribution.complete:
            return False
        while self._turn < len(self._turns) and self._turns[self._turn].contribution.complete:
            self._complete(self._turns[self._turn])
            self._turn += 1
        return True

    def end(self) -> None:
        """End the backward pass: reduce the remaining flats, with zeros for unused slots."""
        for gradient in self._turns[self._turn :]:
            self._complete(gradient)
        self._turn = len(self._turns)
        for gradient in self._turns:  # gradients that arrived after their flat's turn (reentrant checkpointing)
            if gradient.contribution.arrived:
                self._complete(gradient)
        self._last.update(self._roles)
        self.open = False

    def _complete(self, gradient: FlatGradient) -> None:
        """Accept all gradients of this pass for one flat, and launch its reduction if there is one."""
        self._reopen(gradient)
        role = self._roles[gradient]
        wire = gradient.take(role)
        boundary = role is BackwardRole.LAST and gradient.meets_in_pass
        if wire is not None or boundary:
            self._launch(gradient, wire, boundary)
        else:
            gradient.move(_S.ACCUMULATED)
            gradient.kept.rest()
            self.reduced(gradient)

    def _reopen(self, gradient: FlatGradient) -> None:
        if gradient.state is _S.REDUCING:
            self.drain()
        gradient.reopen()

    # -- at the step boundary --------------------------------------------------------------------------------------

    def finish(self) -> None:
        """Bring every flat to READY; collective. A rank without a backward pass contributes zeros, once."""
        self.drain()
        for gradient in self._order:
            if gradient.state is not _S.READY:
                # Gradients accumulated under no_sync are still to be sent, and a rank without a pass must send zeros.
                owing = self._last.get(gradient, BackwardRole.ALONE) is BackwardRole.ALONE
                wire = gradient.fill_wire() if owing and gradient.cut else None
                self._launch(gradient, wire, gradient.meets_at_boundary)
        self.drain()
        self._last = dict.fromkeys(self._order, BackwardRole.SUMMED)
        self._mover.quiet()  # offloaded gradients are read on the host from now on

    def reset(self) -> None:
        """Drop all gradients, after the step."""
        self.drain()
        self._last = {}
        for gradient in self._order:
            gradient.forget()
        for pool in self._pools.values():
            pool.reclaim()

    @property
    def idle(self) -> bool:
        """Return whether no reduction is in progress."""
        return not self._active

    def drain(self) -> None:
        """Finish all running reductions."""
        while self._active:
            self._advance()

    # -- reductions ------------------------------------------------------------------------------------------------

    def _launch(self, gradient: FlatGradient, wire: Tensor | None, boundary: bool) -> None:
        self._advance()  # before the launch, on every rank: keeps one order of collectives
        gradient.move(_S.REDUCING)
        reduction = self._reduction(gradient, wire, boundary)
        with observe.span("launch reduction", gradient.name):
            if next(reduction, self) is not self:
                self._active.append(reduction)
        if not self._overlapped:
            self.drain()

    def _advance(self) -> None:
        """Wait for the running collective of each reduction and start its next one."""
        self._active = [reduction for reduction in self._active if next(reduction, self) is not self]

    def _reduction(self, gradient: FlatGradient, wire: Tensor | None, boundary: bool) -> Iterator[None]:
        """Run one reduction, pausing at each collective.

        Args:
            wire: the communication buffer with this pass's gradients, if they are not accumulated: input of R2 or, if
                that is the identity, of R3.
            boundary: whether the reduction includes R3.
        """
        tag, number = f"reduce {gradient.name}", self._number
        # R2, if gradients are sharded. The buffer is free for the next flat as soon as it is sent.
        if gradient.cut and wire is not None:
            gradient.kept.bring()
            sent = _CommBuffer.of(gradient, wire, gradient.buffer)
            scatter = gradient.rests.scatter
            yield from self._scatter(gradient, scatter, sent, gradient.buffer, tag, accumulate=gradient.summing)
            gradient.summing = True
            wire = None
        last = boundary or not gradient.meets_at_boundary
        # Buffers are not zeroed between steps: slots without a gradient hold stale values, which must not be summed.
        if last and not gradient.cut and wire is None:
            gradient.zero_absent(gradient.kept.values)
            if gradient.pools:
                gradient.kept.zero_gaps()
        elif last and gradient.cut and not gradient.summing:
            gradient.kept.values.zero_()
        # R3: first over the axes that shard states further, then, with that shard, over the axes that replicate states.
        if boundary and gradient.meets_at_boundary:
            gradient.kept.bring()
        if boundary and gradient.rests.deeper.many:
            yield from self._sum_deeper(gradient, wire, tag)
            wire = None
        if boundary and gradient.rests.beyond.many:
            yield from self._sum_beyond(gradient, wire, tag)
        if last:
            gradient.add_carry()
        gradient.move(_S.READY if last else _S.ACCUMULATED)
        gradient.kept.rest()
        if number == self._number:  # else an earlier pass launched it; this one may add to it
            self.reduced(gradient)

    def _sum_deeper(self, gradient: FlatGradient, wire: Tensor | None, tag: str) -> Iterator[None]:
        """Run reduce_scatter over states - gradients (axes that shard only states), into this rank's own shard."""
        sent = _CommBuffer.of(gradient, wire, gradient.buffer)
        yield from self._scatter(gradient, gradient.rests.deepen, sent, gradient.own, tag)

    def _sum_beyond(self, gradient: FlatGradient, wire: Tensor | None, tag: str) -> Iterator[None]:
        """Sum this rank's own shard, or ``wire``, over the ranks with the same optimizer states: D - states.

        D - states are the mesh axes over which gradients are averaged but states are not sharded. If the communication
        dtype is low-precision and that of sums is float32, or a wire is thin: reduce_scatter into float32 sums, then
        all_gather the sums. So no rank sees the sum rounded: optimizer states would drift from presets that keep the
        sum on its owner. If the precision asks for rounded sums, all ranks see the same rounded sum.
        """
        own, hops = gradient.own, gradient.rests.spread
        sent = _CommBuffer.of(gradient, wire, own)
        if gradient.sums == gradient.wire and not any(hop.bits for hop in hops):
            sent = sent.rounded()
            yield from _wait_when_resumed(gradient.rests.beyond.communicator("reduce").all_reduce(sent.values, tag=tag))
            if sent.values is not own:
                ops.cast(sent.values, own)
            sent.give_back()
            return
        yield from self._scatter(gradient, hops, sent, _nested_shards(own, hops)[-1], tag)
        sums = _CommBuffer(gradient, own)
        if gradient.sums != own.dtype:
            sums = _CommBuffer.lent(gradient, own.numel(), gradient.sums)
            ops.cast(_nested_shards(own, hops)[-1], _nested_shards(sums.values, hops)[-1])
        *parts, part = _nested_shards(sums.values, hops)
        for hop, outer in zip(reversed(hops), reversed(parts), strict=True):
            yield from _wait_when_resumed(hop.group.communicator("reduce").all_gather(outer, part, tag=tag))
            part = outer
        if sums.values is not own:
            ops.cast(sums.values, own)
        sums.give_back()

    @staticmethod
    def _scatter(
        gradient: FlatGradient,
        hops: Sequence[LevelTransfer],
        sent: _CommBuffer,
        into: Tensor,
        tag: str,
        *,
        accumulate: bool = False,
    ) -> Iterator[None]:
        """Run a reduce_scatter level by level.

        Over a thin level each rank receives its part as codes and scales, in one message, and sums the dequantized
        values in float32, in rank order: codes are never summed.

        Args:
            into: float32; this rank's part of the sums.
            accumulate: add the sums to ``into`` instead of overwriting it.
        """
        for i, hop in enumerate(hops):
            last = i == len(hops) - 1
            adds = accumulate and last
            ranks, communicator = hop.group.size, hop.group.communicator("reduce")
            numel = sent.values.numel()
            if hop.bits is None:
                sent = sent.rounded()
                sums = _CommBuffer(gradient, into) if last else _CommBuffer.lent(gradient, numel // ranks)
                yield from _wait_when_resumed(
                    communicator.reduce_scatter(sums.values, sent.values, accumulate=adds, tag=tag)
                )
                sent.give_back()
            else:
                pool, nbytes = gradient.pools[hop], ranks * thin_message_bytes(numel // ranks, hop.bits)
                codes, _ = pool.acquire(nbytes, torch.uint8)
                residual = gradient.residuals.get(hop)
                ops.quantize(sent.values, codes, bits=hop.bits, pieces=ranks, residual=residual)
                sent.give_back()  # the codes replace it
                arrived, _ = pool.acquire(nbytes, torch.uint8)
                yield from _wait_when_resumed(communicator.all_to_all(arrived, codes, tag=tag))
                pool.release(codes)
                sums = _CommBuffer(gradient, into) if last else _CommBuffer.lent(gradient, numel // ranks)
                ops.dequantize_sum(arrived, sums.values, bits=hop.bits, rows=ranks, accumulate=adds)
                pool.release(arrived)
            sent = sums


class _CommBuffer:
    """Hold the input or output of a collective: a pooled buffer, or a resident float32 tensor.

    Args:
        kind: property of the buffer's contents on which its next user may rely; see
            :class:`~npuzero.memory.BufferPool`.
    """

    def __init__(self, gradient: FlatGradient, values: Tensor, is_lent: bool = False, kind: Hashable = None) -> None:
        self.values = values
        self._gradient, self._is_lent, self._kind = gradient, is_lent, kind

    @staticmethod
    def of(gradient: FlatGradient, wire: Tensor | None, resting: Tensor) -> _CommBuffer:
        """Return ``wire``, a pooled buffer of the communication dtype; if it is None, ``resting``."""
        return (
            _CommBuffer(gradient, resting) if wire is None else _CommBuffer(gradient, wire, True, gradient.layout.gaps)
        )

    @staticmethod
    def lent(gradient: FlatGradient, numel: int, dtype: torch.dtype = torch.float32) -> _CommBuffer:
        """Return a pooled communication buffer."""
        return _CommBuffer(gradient, gradient.pool.acquire(numel, dtype)[0], True)

    def rounded(self) -> _CommBuffer:
        """Return the values in the communication dtype, without a copy if they already have it."""
        if self.values.dtype == self._gradient.wire:
            return self
        rounded = _CommBuffer.lent(self._gradient, self.values.numel(), self._gradient.wire)
        ops.cast(self.values, rounded.values)
        self.give_back()
        return rounded

    def give_back(self) -> None:
        """Release the buffer to its pool, if it is pooled."""
        if self._is_lent:
            self._gradient.pool.release(self.values, self._kind)


def _nested_shards(own: Tensor, hops: Sequence[LevelTransfer]) -> list[Tensor]:
    """Return ``own``, this rank's part of it at the first level, the part of that at the second, and so on."""
    parts = [own]
    for hop in hops:
        parts.append(parts[-1].chunk(hop.group.size)[hop.group.index])
    return parts


def _wait_when_resumed(handle: AsyncHandle) -> Iterator[None]:
    """Pause while the collective runs; wait for it when resumed."""
    yield
    try:
        handle.wait()
    except BaseException:
        wait_quietly([handle])  # the collective must not use the buffers after the error frees them
        raise
