"""R2 and R3: gradients leave autograd, are summed over the ranks, and end as this rank's shard.

Gradients are scaled as they are packed, so every reduction is a plain sum (an averaging collective is slower or
missing on some backends, and one of them scales its input in place).

A flat is reduced as soon as all its gradients are there, in one order of the flats that all ranks share, whatever order
autograd produced the gradients in: a flat of which this rank used nothing contributes zeros at its turn. A reduction is
a generator that pauses while its collective is under way, since a two-level reduction's second collective needs the
first one's result. Each launch first moves every earlier reduction one step on: an order that depends on nothing but
the launches.
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
    """Take gradients as they leave autograd and bring them to READY.

    Attributes:
        open: whether a backward pass is under way.
        reduced: told of a gradient to which nothing more is added in the present pass.
    """

    def __init__(self, units: Sequence[Unit], spaces: MemorySpaces, overlapped: bool) -> None:
        self._order = [flat.gradient for unit in reduction_order(units) for flat in reversed(unit.trainable)]
        self._overlapped = overlapped
        self._mover = spaces.mover
        pools = self._pools = dict[Axes, BufferPool]()

        def pool(group: RankGroup | None) -> BufferPool:
            # A communication buffer lies where the ranks of its collective can read it.
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
        self._last: dict[FlatGradient, BackwardRole] = {}  # what the last pass of this step was to each, so far
        self.open = False
        self.reduced: Callable[[FlatGradient], None] = lambda _: None

    # -- while backward runs ---------------------------------------------------------------------------------------

    def begin(self, roles: Mapping[FlatGradient, BackwardRole]) -> None:
        """Start a backward pass.

        Args:
            roles: what the pass is to each gradient that it brings, in the order in which they are reduced.
        """
        self.abandon()
        self._roles, self._turns = roles, list(roles)
        self._number += 1
        self.open = True

    def abandon(self) -> None:
        """Drop a pass that raised: what it has brought so far has no turn any more."""
        self.open = False
        self._turn = 0
        for gradient in self._order:
            gradient.contribution.arrived.clear()

    def arrive(self, gradient: FlatGradient, i: int, value: Tensor) -> bool:
        """Take ``value``, the final gradient of slot ``i`` in this pass.

        Returns:
            whether it is the last of its flat.
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
        """End the backward pass: flats of which something was not used take their turn with zeros."""
        for gradient in self._turns[self._turn :]:
            self._complete(gradient)
        self._turn = len(self._turns)
        for gradient in self._turns:  # parameters that autograd finished twice in one pass (reentrant checkpointing)
            if gradient.contribution.arrived:
                self._complete(gradient)
        self._last.update(self._roles)
        self.open = False

    def _complete(self, gradient: FlatGradient) -> None:
        """Take in everything this pass adds to a flat, which is all here, and launch what can be launched."""
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
        """Bring every flat to READY; collective. A rank without a backward pass contributes zeros."""
        self.drain()
        for gradient in self._order:
            if gradient.state is not _S.READY:
                # What no_sync has kept is still to be sent, and a rank that had no pass owes the others its zeros.
                owing = self._last.get(gradient, BackwardRole.ALONE) is BackwardRole.ALONE
                wire = gradient.fill_wire() if owing and gradient.cut else None
                self._launch(gradient, wire, gradient.meets_at_boundary)
        self.drain()
        self._last = dict.fromkeys(self._order, BackwardRole.SUMMED)
        self._mover.quiet()  # what rests on the host is read there from now on

    def reset(self) -> None:
        """Drop the gradients: the step is done with them."""
        self.drain()
        self._last = {}
        for gradient in self._order:
            gradient.forget()
        for pool in self._pools.values():
            pool.reclaim()

    @property
    def idle(self) -> bool:
        """Return whether no reduction is under way."""
        return not self._active

    def drain(self) -> None:
        """Finish every reduction under way."""
        while self._active:
            self._advance()

    # -- reductions ------------------------------------------------------------------------------------------------

    def _launch(self, gradient: FlatGradient, wire: Tensor | None, boundary: bool) -> None:
        self._advance()
        gradient.move(_S.REDUCING)
        reduction = self._reduction(gradient, wire, boundary)
        with observe.span("launch reduction", gradient.name):
            if next(reduction, self) is not self:
                self._active.append(reduction)
        if not self._overlapped:
            self.drain()

    def _advance(self) -> None:
        """Move each reduction under way one collective on; waits for the present one."""
        self._active = [reduction for reduction in self._active if next(reduction, self) is not self]

    def _reduction(self, gradient: FlatGradient, wire: Tensor | None, boundary: bool) -> Iterator[None]:
        """Run one reduction, pausing at each collective.

        Args:
            wire: the communication buffer with this pass's gradients, where they are not accumulated: for R2, or where
                that is the identity for R3.
            boundary: R3 is part of it.
        """
        tag, number = f"reduce {gradient.name}", self._number
        # R2, where gradients are sharded; the buffer is free for the next flat as soon as it is sent.
        if gradient.cut and wire is not None:
            gradient.kept.bring()
            sent = _CommBuffer.of(gradient, wire, gradient.buffer)
            scatter = gradient.rests.scatter
            yield from self._scatter(gradient, scatter, sent, gradient.buffer, tag, accumulate=gradient.summing)
            gradient.summing = True
            wire = None
        last = boundary or not gradient.meets_at_boundary
        # Buffers are not zeroed between steps: where no gradient has come they hold something older, which must not be
        # summed.
        if last and not gradient.cut and wire is None:
            gradient.zero_absent(gradient.kept.values)
            if gradient.pools:
                gradient.kept.zero_gaps()
        elif last and gradient.cut and not gradient.summing:
            gradient.kept.values.zero_()
        # R3: first over the axes that shard states further, then over those that replicate them, with what is left.
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
        if number == self._number:  # else it is of an earlier pass, and this one may add to it
            self.reduced(gradient)

    def _sum_deeper(self, gradient: FlatGradient, wire: Tensor | None, tag: str) -> Iterator[None]:
        """Run reduce_scatter over the axes of states beyond those of gradients, into this rank's own part."""
        sent = _CommBuffer.of(gradient, wire, gradient.buffer)
        yield from self._scatter(gradient, gradient.rests.deepen, sent, gradient.own, tag)

    def _sum_beyond(self, gradient: FlatGradient, wire: Tensor | None, tag: str) -> Iterator[None]:
        """Sum this rank's own shard, or ``wire``, over the ranks that keep the same states: D - states.

        Here D - states are the mesh axes over which gradients are averaged but states are not sharded. Where the
        communication dtype is low-precision and the sums' is float32, or a wire is thin: reduce_scatter into float32
        sums, then all_gather of the sums, so that no rank sees the sum rounded (states would drift apart from the
        presets that keep the sum where it was made); or all ranks see it rounded, where the precision says so.
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

        Over a thin level each rank is sent its part as codes and scales, in one message, and adds up in float32 what
        comes, in the order of the ranks: no code is ever added to another.

        Args:
            into: float32; this rank's part of the sums. ``accumulate``: they are added to it.
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
                sent.give_back()  # as soon as it is codes
                arrived, _ = pool.acquire(nbytes, torch.uint8)
                yield from _wait_when_resumed(communicator.all_to_all(arrived, codes, tag=tag))
                pool.release(codes)
                sums = _CommBuffer(gradient, into) if last else _CommBuffer.lent(gradient, numel // ranks)
                ops.dequantize_sum(arrived, sums.values, bits=hop.bits, rows=ranks, accumulate=adds)
                pool.release(arrived)
            sent = sums


class _CommBuffer:
    """Hold what a collective sends, or makes: in a buffer that is lent, or where it rests, float32.

    Args:
        kind: what whoever is lent the buffer next may rely on; see :class:`~npuzero.memory.BufferPool`.
    """

    def __init__(self, gradient: FlatGradient, values: Tensor, is_lent: bool = False, kind: Hashable = None) -> None:
        self.values = values
        self._gradient, self._is_lent, self._kind = gradient, is_lent, kind

    @staticmethod
    def of(gradient: FlatGradient, wire: Tensor | None, resting: Tensor) -> _CommBuffer:
        """Return ``wire``, which has the communication dtype and is lent, or without one what is ``resting``."""
        return (
            _CommBuffer(gradient, resting) if wire is None else _CommBuffer(gradient, wire, True, gradient.layout.gaps)
        )

    @staticmethod
    def lent(gradient: FlatGradient, numel: int, dtype: torch.dtype = torch.float32) -> _CommBuffer:
        """Return a buffer that is lent."""
        return _CommBuffer(gradient, gradient.pool.acquire(numel, dtype)[0], True)

    def rounded(self) -> _CommBuffer:
        """Return the values in the communication dtype: themselves, where they have it."""
        if self.values.dtype == self._gradient.wire:
            return self
        rounded = _CommBuffer.lent(self._gradient, self.values.numel(), self._gradient.wire)
        ops.cast(self.values, rounded.values)
        self.give_back()
        return rounded

    def give_back(self) -> None:
        """Let others have the buffer, where it is lent."""
        if self._is_lent:
            self._gradient.pool.release(self.values, self._kind)


def _nested_shards(own: Tensor, hops: Sequence[LevelTransfer]) -> list[Tensor]:
    """Return all of ``own``, this rank's part of it by the first level, of that by the second, and so on."""
    parts = [own]
    for hop in hops:
        parts.append(parts[-1].chunk(hop.group.size)[hop.group.index])
    return parts


def _wait_when_resumed(handle: AsyncHandle) -> Iterator[None]:
    """Pause while the collective is under way; finish it when resumed."""
    yield
    try:
        handle.wait()
    except BaseException:
        wait_quietly([handle])  # whoever raised gives up the buffers that the collective reads and writes
        raise
