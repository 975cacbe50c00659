"""R1: all-gather (unshard) a unit's parameters before it computes, and release (reshard) them after."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from npuzero import observe, ops
from npuzero.device import AsyncHandle, wait_quietly
from npuzero.memory import BufferPool, MemorySpaces
from npuzero.plan import Axes, Memory, thin_message_bytes
from npuzero.shard.layout.shard_specs import ShardSpec
from npuzero.shard.offload.load_parameters import ParameterLoader
from npuzero.shard.parameters.user_writes import UserWrites
from npuzero.shard.state.flat_parameter import FlatParameter
from npuzero.shard.state.life_cycle import ParameterState
from npuzero.shard.state.unit import Unit

_S = ParameterState


@dataclass
class _UnitGather:
    """Hold a gather in flight, and the data to undo it.

    Attributes:
        before: the unit's state before the gather.
        flats: flats with memory allocated for the gather.
        failed: the gather raised and has not been undone yet.
    """

    before: ParameterState
    flats: list[FlatParameter] = field(default_factory=list)
    handles: list[AsyncHandle] = field(default_factory=list)
    failed: bool = False


class ParameterGatherer:
    """Start, finish and undo the all-gather of units. Every start must be followed by a finish on every rank.

    If either raises, the unit returns to its state before the start: its memory is released, no gather is in flight.
    """

    def __init__(self, writes: UserWrites, fetcher: ParameterLoader, spaces: MemorySpaces) -> None:
        self._writes = writes
        self._fetcher = fetcher
        self._device = spaces[Memory.DEVICE]
        self._pools: dict[Axes, BufferPool] = {}  # of codes, by the axes of the ranks that read them in place
        self._gathers: dict[int, _UnitGather] = {}  # in flight, by unit

    def start(self, unit: Unit, purpose: str = "gather") -> None:
        """Start to gather ``unit``, unless it is unsharded or its gather is in flight.

        Args:
            purpose: the same on every rank. ``"gather"`` (to compute) may send quantized parameters; no other does.
        """
        under_way = self._gathers.get(unit.index)
        if under_way is not None and under_way.failed:  # an interrupt stopped _undo()
            self._undo(unit, under_way)
        if unit.parameter_state not in (_S.SHARDED, _S.HELD):
            return
        gather = self._gathers[unit.index] = _UnitGather(unit.parameter_state)
        unit.move(_S.GATHERING)
        try:
            self._begin(unit, gather, purpose)
        except BaseException:
            self._undo(unit, gather)
            raise

    def _begin(self, unit: Unit, gather: _UnitGather, purpose: str) -> None:
        from_held = gather.before is _S.HELD
        rounds = unit.thin and purpose == "gather"
        send = self._send_thin if rounds else self._send
        if not from_held:
            unit.rounded = rounds
        flats, handles = gather.flats, gather.handles
        flats += [flat for flat in unit.flats if flat.apart and not flat.transient.here]
        tag = f"{purpose} {unit.name}"
        for flat in flats:
            flat.transient.restore()
        if unit.plan.parameters.far and not from_held:
            if flats:
                self._fetcher.gather(unit, flats, tag, send, handles)
            return
        for flat in flats:
            held = next(((rest, copy.tensor) for rest, copy in flat.held.items() if copy.here), None)
            # A held copy of gathered values is not rounded again: backward uses the values that forward used.
            handles.append(
                self._send(flat, *held, tag) if held else send(flat, flat.rests.parameters, flat.resting, tag)
            )

    def _undo(self, unit: Unit, gather: _UnitGather) -> None:
        gather.failed = True
        wait_quietly(gather.handles)
        for flat in gather.flats:
            flat.transient.release()
        unit.move(gather.before)
        del self._gathers[unit.index]

    @staticmethod
    def _send(flat: FlatParameter, rest: ShardSpec, shard: Tensor, tag: str) -> AsyncHandle:
        return rest.group.communicator("gather").all_gather(flat.whole, shard, tag=tag)

    def _send_thin(self, flat: FlatParameter, rest: ShardSpec, shard: Tensor, tag: str) -> AsyncHandle:
        """Start to all-gather codes of ``shard``. A rank decodes also its part, so all ranks use the same values."""
        bits = flat.plan.precision.gather_bits
        assert bits is not None
        group = rest.group
        communicator = group.communicator("gather")
        if group.axes not in self._pools:
            self._pools[group.axes] = BufferPool(self._device, communicator.buffer)
        pool = self._pools[group.axes]
        codes, _ = pool.acquire(group.size * thin_message_bytes(rest.numel, bits), torch.uint8)
        try:
            mine = codes.chunk(group.size)[group.index]
            ops.quantize(shard, mine, bits=bits)
            arriving = communicator.all_gather(codes, mine, tag=tag)
        except BaseException:
            pool.release(codes)
            raise
        return _QuantizedHandle(arriving, codes, flat.whole, bits, group.size, pool)

    def read_ahead(self, unit: Unit) -> None:
        """Prefetch parameters of ``unit`` from disk, if its next gather reads them."""
        if unit.parameter_state is _S.SHARDED:
            self._fetcher.ahead(unit)

    def finish(self, unit: Unit, purpose: str = "gather") -> None:
        """Wait until ``unit`` is unsharded, then open its parameters to reads; start a gather if none is in flight."""
        if unit.parameter_state is not _S.WHOLE:
            self.start(unit, purpose)
            gather = self._gathers[unit.index]
            try:
                with observe.span("wait for gather", unit.name):
                    for handle in gather.handles:
                        handle.wait()
            except BaseException:
                self._undo(unit, gather)
                raise
            unit.move(_S.WHOLE)
            del self._gathers[unit.index]
        unit.reopen()
        unit.check_views()

    def hold(self, unit: Unit) -> None:
        """Reshard ``unit`` to the plan's ``after_forward``, unless it is being gathered again."""
        if unit.parameter_state is not _S.GATHERING:
            self._release(unit, [flat.rests.after_forward for flat in unit.flats])

    def hold_between(self, unit: Unit) -> None:
        """Reshard ``unit`` to the plan's ``between``, for the next micro-batch."""
        self._release(unit, [flat.rests.between for flat in unit.flats])

    def release(self, unit: Unit) -> None:
        """Reshard ``unit`` to the plan's ``parameters``: keep only the local shards."""
        self._release(unit, [flat.rests.parameters for flat in unit.flats])

    def _release(self, unit: Unit, keep: Sequence[ShardSpec]) -> None:
        """Reshard each flat to its spec in ``keep``; the local shard always stays."""
        if not unit.guarded:
            return
        if unit.parameter_state is _S.GATHERING:  # prefetched, but never used
            self.finish(unit)
        more = any(flat.rests.more(rest) for flat, rest in zip(unit.flats, keep, strict=True))
        # A held unit keeps at least as much as `between` does, and its backward needs it.
        if unit.parameter_state is _S.SHARDED or (more and unit.parameter_state is _S.HELD):
            return
        try:
            if unit.parameter_state is _S.WHOLE:
                self._writes.look(unit)  # the program's writes are only in the unsharded flat, which is released below
            unit.close()
            for flat, rest in zip(unit.flats, keep, strict=True):
                self._keep(flat, rest)
        except BaseException:
            self._drop(unit)
            raise
        # If only the local shards are kept, the unit is sharded.
        unit.move(_S.HELD if more else _S.SHARDED)

    @staticmethod
    def _drop(unit: Unit) -> None:
        """Release everything but the local shards, also copies kept so far."""
        unit.close()
        for flat in unit.flats:
            for copy in flat.held.values():
                copy.release()
            if flat.apart:
                flat.transient.release()
        unit.move(_S.SHARDED)

    @staticmethod
    def _keep(flat: FlatParameter, rest: ShardSpec) -> None:
        for held, copy in flat.held.items():
            if held is not rest:
                copy.release()
        if rest in flat.held:
            flat.held[rest].restore()
            flat.held[rest].tensor.copy_(flat.whole[slice(*rest.range)])
        if flat.apart and (rest.cut or not flat.rests.more(rest)):
            flat.transient.release()


class _QuantizedHandle(AsyncHandle):
    """Wait for parameters that arrive as codes, and dequantize them."""

    def __init__(
        self, arriving: AsyncHandle, codes: Tensor, whole: Tensor, bits: int, pieces: int, pool: BufferPool
    ) -> None:
        self._arriving = arriving
        self._codes: Tensor | None = codes  # None once dequantized
        self._whole = whole
        self._bits, self._pieces = bits, pieces
        self._pool = pool

    def wait(self) -> None:
        self._arriving.wait()
        if self._codes is not None:
            codes, self._codes = self._codes, None
            try:
                ops.dequantize_sum(codes, self._whole, bits=self._bits, pieces=self._pieces)
            finally:
                self._pool.release(codes)

    def done(self) -> bool:
        return self._arriving.done()
