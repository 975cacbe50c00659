"""Load offloaded parameter shards into their place in the unsharded flat on the device, before R1 gathers them.

Two stages: disk to host, which starts one unit further ahead than R1; then host to device, the first part of R1.
Parameters on the host need only the second stage.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

from torch import Tensor

from npuzero import observe
from npuzero.device import AsyncHandle, wait_quietly
from npuzero.errors import NpuZeroError
from npuzero.memory import BufferRing, HostCopier, MemorySpaces
from npuzero.plan import FROM_DISK, READ_SLOTS
from npuzero.shard.layout.shard_specs import ShardSpec
from npuzero.shard.offload.nvme_parameters import NvmeParameterStore
from npuzero.shard.state.flat_parameter import FlatParameter
from npuzero.shard.state.unit import Unit


class _UnitRead(NamedTuple):
    """Hold a read of a unit's shards from disk, in flight or done; ``versions`` are those when it started."""

    turn: int
    versions: list[int]
    buffers: Mapping[FlatParameter, Tensor]
    handles: Sequence[AsyncHandle]


class ParameterLoader:
    """Load the offloaded parameter shards of units to the device.

    Args:
        units: all units that may be loaded.
        file: store of the parameters on disks; None: no parameters are on disks.
        updated: returns whether the update of a unit has finished.
        refuse: makes every later use of the model fail; called with a description of the failure and the error.
    """

    def __init__(
        self,
        units: Sequence[Unit],
        file: NvmeParameterStore | None,
        spaces: MemorySpaces,
        updated: Callable[[Unit], bool],
        refuse: Callable[[str, BaseException], None],
    ) -> None:
        self._file = file
        self._updated = updated
        self._refuse = refuse
        self._mover: HostCopier = spaces.mover
        self._reads: dict[int, _UnitRead] = {}  # by unit
        self._turn = 0
        self._leaving: dict[int, list[AsyncHandle]] = {}  # by slot, copies out of it
        if file is not None:
            largest = max(sum(map(file.read_bytes, self._on_disk(unit))) for unit in units)
            self._ring = BufferRing(spaces.host, largest, READ_SLOTS)

    def ahead(self, unit: Unit) -> None:
        """Prefetch a unit's parameters from disk, unless their update is still in flight."""
        if self._on_disk(unit) and self._updated(unit):
            self._read(unit)

    def gather(
        self,
        unit: Unit,
        flats: Sequence[FlatParameter],
        tag: str,
        send: Callable[[FlatParameter, ShardSpec, Tensor, str], AsyncHandle],
        handles: list[AsyncHandle],
    ) -> None:
        """Start to unshard ``flats``, all flats of ``unit`` to gather. Their memory is already allocated.

        If it raises, no copy into that memory is in flight, and ``handles`` has the gathers that are.

        Args:
            send: starts the all-gather of a flat, given the copy of its local shard on the device.
            handles: receives the handles of the gathers.

        Raises:
            StorageError, OutOfSpace: a disk failed; every later use of the model is an error.
        """
        read = self._read(unit) if self._on_disk(unit) else None
        try:
            for handle in read.handles if read else ():
                handle.wait()
        except NpuZeroError as error:
            self._refuse("a read of parameters", error)
            raise
        self._mover.follow()
        try:
            self._gather(flats, tag, send, handles, read)
        except BaseException:
            self._mover.quiet()
            raise
        self._reads.pop(unit.index, None)

    def _gather(
        self,
        flats: Sequence[FlatParameter],
        tag: str,
        send: Callable[[FlatParameter, ShardSpec, Tensor, str], AsyncHandle],
        handles: list[AsyncHandle],
        read: _UnitRead | None,
    ) -> None:
        for flat in flats:
            rest = flat.rests.parameters
            own = flat.whole[slice(*rest.range)]
            for begin, source in self._sources(flat, read):
                arrived = self._mover.to_device(own[begin : begin + source.numel()], source)
                if read is not None:
                    self._leaving.setdefault(read.turn % READ_SLOTS, []).append(arrived)
            with self._mover.beside():
                handles.append(send(flat, rest, own, tag) if rest.group.many else self._mover.arrival())

    def _sources(self, flat: FlatParameter, read: _UnitRead | None) -> Iterator[tuple[int, Tensor]]:
        """Yield a flat's local shard on the host, as (offset in the shard, part)."""
        if read is None or self._file is None or not self._file.has(flat):
            yield 0, flat.resting
            return
        for place in self._file.places(flat):
            nbytes = (place.end - place.begin) * flat.dtype.itemsize
            yield place.begin, read.buffers[flat][place.at : place.at + nbytes].view(flat.dtype)

    def _read(self, unit: Unit) -> _UnitRead:
        """Start to read a unit's shards into a ring slot, unless a read of the same versions was started before."""
        assert self._file is not None
        flats = self._on_disk(unit)
        versions = [self._file.versions[flat] for flat in flats]
        read = self._reads.get(unit.index)
        if read is not None and read.versions == versions:
            return read
        observe.instant("read", unit.name)
        turn, self._turn = self._turn, self._turn + 1
        self._empty(turn % READ_SLOTS)
        buffers: dict[FlatParameter, Tensor] = {}
        handles: list[AsyncHandle] = []
        begin = 0
        try:
            for flat in flats:
                end = begin + self._file.read_bytes(flat)
                buffers[flat] = self._ring.slot(turn)[begin:end]
                self._file.read(flat, buffers[flat], handles)
                begin = end
        except BaseException:
            wait_quietly(handles)  # they write into the slot, and the next read may take it
            raise
        self._mover.moved[FROM_DISK] += begin
        self._reads[unit.index] = read = _UnitRead(turn, versions, buffers, handles)
        return read

    def _empty(self, slot: int) -> None:
        """Wait for pending reads into a slot and for copies out of it, and drop its unused prefetch."""
        for index, read in list(self._reads.items()):
            if read.turn % READ_SLOTS == slot:
                wait_quietly(read.handles)  # gather() reads the unit again, and raises the error if it persists
                del self._reads[index]
        for handle in self._leaving.get(slot, ()):
            handle.wait()
        self._leaving.pop(slot, None)

    def _on_disk(self, unit: Unit) -> list[FlatParameter]:
        return [] if self._file is None else [flat for flat in unit.flats if self._file.has(flat)]
