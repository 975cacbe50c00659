"""The offloaded states of a model: their division into chunks, the stores that hold them, and their update."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from npuzero.config import Settings
from npuzero.memory import MemorySpaces
from npuzero.plan import FAR_CHUNK_BYTES, MOMENT_BLOCK, Memory, offloaded_block_bytes
from npuzero.shard.offload.chunks import ShardPiece, divide_into_chunks
from npuzero.shard.offload.delayed_update import DelayedUpdate
from npuzero.shard.offload.host_states import Fields, HostStateStore, StateStore
from npuzero.shard.offload.nvme_parameters import NvmeParameterStore
from npuzero.shard.offload.nvme_states import NvmeStateStore
from npuzero.shard.offload.offloaded_update import OffloadedUpdate
from npuzero.shard.state.flat_parameter import EXACT, PARAMETERS, FlatParameter
from npuzero.shard.state.tiered_tensor import TieredTensor
from npuzero.shard.state.unit import Unit


class OffloadedStates:
    """Hold the offloaded states of one model.

    Attributes:
        stream: updates them.
        file: store of the parameters on disks; None: no parameters are on disks.
        masters: stores that make masters exact: float32 masters, or the int16 remainders of split ones.
        lag: parameters that are ahead of those on the device, if the plan delays updates.
    """

    def __init__(self, units: Sequence[Unit], spaces: MemorySpaces, settings: Settings) -> None:
        flats = [flat for unit in units for flat in unit.trainable if flat.far]
        shards = [ShardPiece(flat, flat.rests.states.near, flat.rests.states.numel) for flat in flats]
        chunk_bytes = settings.chunk_bytes or FAR_CHUNK_BYTES
        chunks = list(divide_into_chunks(shards, _block_bytes, chunk_bytes))
        self._spaces = spaces
        self.stream = OffloadedUpdate(
            units,
            tuple(chunks),
            spaces,
            overlap=settings.overlaps_parameters,
            on_device=settings.update_on == "device",
            lag=any(flat.plan.lag for flat in flats),
        )
        # The update sees only the chunks passed above. Those of frozen parameters must follow them, so that the update
        # and the parameter file number chunks alike.
        filed = [flat for unit in units for flat in unit.flats if flat.rests.parameters.memory is Memory.NVME]
        frozen = [ShardPiece(flat, 0, flat.rests.parameters.numel) for flat in filed if not flat.trainable]
        chunks += divide_into_chunks(frozen, lambda flat: MOMENT_BLOCK * flat.dtype.itemsize, chunk_bytes)
        self.file = NvmeParameterStore(chunks, filed, self.stream.quiet, spaces) if filed else None
        self.masters = self.banks({flat: dict([EXACT[flat.masters]]) for flat in flats if flat.masters in EXACT})
        self.lag = DelayedUpdate([flat for flat in flats if flat.plan.lag], self.stream, spaces)

    def banks(self, fields: Fields) -> list[StateStore]:
        """Make zeroed stores for states of offloaded flats: one for each memory that the states are placed in."""
        found: list[StateStore] = []
        for memory in dict.fromkeys(flat.rests.states.memory for flat in fields):
            mine = {flat: states for flat, states in fields.items() if flat.rests.states.memory is memory}
            make = NvmeStateStore if memory is Memory.NVME else HostStateStore
            found.append(make(self.stream.chunks, mine, self.stream.quiet, self._spaces))
        return found

    def spread(self, flat: FlatParameter, name: str) -> TieredTensor:
        """Return the offloaded part of a flat's exact masters, or its parameters on disks."""
        banks = [self.file] if name == PARAMETERS and self.file is not None else self.masters
        return next(bank for bank in banks if bank.has(flat)).spread(flat, name)

    @property
    def updated(self) -> list[StateStore]:
        """Return the stores that every update reads and writes, independent of the optimizer."""
        return self.masters if self.file is None else [self.file, *self.masters]

    def whole(self, flat: FlatParameter) -> Tensor:
        """Return the float32 masters of a flat; all of them must be on the host."""
        bank = next(bank for bank in self.masters if bank.has(flat))
        assert isinstance(bank, HostStateStore)
        return bank.whole(flat, "master")


def _block_bytes(flat: FlatParameter) -> int:
    return offloaded_block_bytes(flat.plan.precision, flat.dtype)
