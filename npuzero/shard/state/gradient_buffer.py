"""Where the gradient of one flat accumulates: a buffer on the device, and its home where gradients rest on the host.

Who may touch what, where the update runs beside the program (:mod:`npuzero.shard.offload.offloaded_update`): until the
update of a flat is waited for, the lane reads ``own``, and nobody writes there. Backward passes, clipping and whatever
else changes gradients wait for the whole update first (``Boundary.finish``, ``Boundary.reopen``); what dropping
gradients changes the lane does not look at; and ``zero_grad()`` leaves releasing the buffer to who waits for the flat's
update. Where updates are delayed there are two homes, and nobody waits: the next step's gradients rest in the one that
is not read.
"""

from __future__ import annotations

import torch
from torch import Tensor

from npuzero.device import AsyncHandle, ReadyHandle
from npuzero.memory import MemorySpaces, TransientBuffer
from npuzero.plan import Memory
from npuzero.shard.layout.flat_layout import FlatLayout
from npuzero.shard.layout.shard_specs import ShardSpecs


class GradientBuffer:
    """Hold the sums of one flat's gradients; names in :mod:`npuzero.shard.state.flat_gradient`.

    Attributes:
        memory: that of the buffer, which comes and goes.
        buffer: [n/G] float32, where gradients are added up and sent from.
        homes: [n/G] float32 each, on the host; the first one is where they rest between passes.
        arrived: for whoever reads the home on the host.
        lent: the update has begun inside backward, and reads what there is: nothing may be added or dropped.
    """

    def __init__(self, layout: FlatLayout, rests: ShardSpecs, spaces: MemorySpaces) -> None:
        self._space = spaces[Memory.DEVICE]
        self._mover = spaces.mover
        # Where they are sharded a reduction writes all of the buffer.
        self._gaps = () if rests.gradients.cut else layout.gaps
        self.memory = self._space.transient(rests.gradients.numel, torch.float32, "gradients")
        self.memory.restore()
        self.buffer = self.memory.tensor
        self.homes: list[Tensor] = []
        if rests.gradients.memory is Memory.HOST:
            numel = rests.gradients.numel
            self.homes = [spaces.host.allocate(numel, torch.float32, "gradients") for _ in range(1 + rests.lag)]
        self._at_home = False
        self.arrived: AsyncHandle = ReadyHandle()
        self.lent = False
        self._read = False  # by an update that is delayed
        self._own = rests.states.within(rests.gradients)
        self._near_numel = rests.states.near
        self._near: TransientBuffer | None = None

    @property
    def own(self) -> Tensor:
        """Return this rank's states shard of what there is, wherever it is."""
        return (self.homes[0] if self._at_home else self.buffer)[self._own]

    @property
    def values(self) -> Tensor:
        """Return all that there is, wherever it is; undefined at first."""
        if self._at_home:
            return self.homes[0]
        self.take()
        return self.buffer

    def take(self) -> None:
        """Let the buffer have memory, whatever is in it."""
        if not self.memory.here:
            self.memory.restore()
            self._zero_gaps(self.buffer)

    def zero_gaps(self) -> None:
        """Zero what belongs to no parameter: a thin wire brings NaN there, too, where it has lost the block."""
        self._zero_gaps(self.values)

    def _zero_gaps(self, of: Tensor) -> None:
        for begin, end in self._gaps:
            of[begin:end].zero_()

    def bring(self) -> None:
        """Let all there is be in the buffer: more is to be added, or it is to be sent."""
        self.take()
        if self._at_home:
            self._mover.follow()
            self._mover.to_device(self.buffer, self.homes[0]).wait()
            self._at_home = False

    def rest(self) -> None:
        """Let what is in the buffer rest at home, where there is one: nothing is added for now."""
        if self.homes and not self._at_home:
            if self._read:
                self.homes.reverse()
                self._read = False
            self._mover.follow()
            self.arrived = self._mover.to_host(self.homes[0], self.buffer)
            self.memory.release()
            self._at_home = True

    def forget(self) -> None:
        """Drop what there is."""
        self._at_home = False

    # -- at the update ---------------------------------------------------------------------------------------------

    def give(self) -> Tensor:
        """Return the own shard for an update beside the program; where it is delayed what comes rests elsewhere."""
        self._read = len(self.homes) > 1
        return self.own

    def lend_near(self) -> Tensor:
        """Return of the own shard what has its states on the device, there."""
        if not self._at_home:
            return self.own[: self._near_numel]
        if self._near is None:
            self._near = self._space.transient(self._near_numel, torch.float32, "gradients")
        self._near.restore()
        self._mover.follow()
        self._mover.to_device(self._near.tensor, self.own[: self._near_numel]).wait()
        return self._near.tensor

    def drop_near(self) -> None:
        """Take back what was lent."""
        if self._near is not None:
            self._near.release()
