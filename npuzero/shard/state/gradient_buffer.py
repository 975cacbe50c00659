"""The accumulation buffer of one flat parameter's gradient: on the device, with a home on the host if offloaded.

Threads, while an update overlaps the program (:mod:`npuzero.shard.offload.offloaded_update`): until the flat's update
is awaited, the lane reads ``own`` and no thread writes it. Backward passes, clipping and all other changes of gradients
first wait for the entire update (``StepBoundary.finish``, ``StepBoundary.reopen``). The lane does not read the fields
that dropping gradients changes. ``zero_grad()`` does not release the buffer: the code that awaits the flat's update
does. With delayed updates there are two homes and no waiting: the next step's gradients go to the home that is not
being read.
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
    """Hold the accumulated gradient of one flat parameter; names in :mod:`npuzero.shard.state.flat_gradient`.

    Attributes:
        memory: transient memory of the buffer.
        buffer: [n/G] float32; gradients are accumulated in it and sent from it.
        homes: [n/G] float32 each, on the host; the first holds the gradient between passes.
        arrived: completes when the copy to the home has finished; wait for it before reading on the host.
        lent: an update has begun inside backward and reads the gradient: nothing may be added or dropped.
    """

    def __init__(self, layout: FlatLayout, rests: ShardSpecs, spaces: MemorySpaces) -> None:
        self._space = spaces[Memory.DEVICE]
        self._mover = spaces.mover
        # If gradients are sharded, a reduction writes the entire buffer, gaps included.
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
        self._read = False  # a delayed update reads homes[0]
        self._own = rests.states.within(rests.gradients)
        self._near_numel = rests.states.near
        self._near: TransientBuffer | None = None

    @property
    def own(self) -> Tensor:
        """Return this rank's states shard of the gradient, in the buffer or in the home."""
        return (self.homes[0] if self._at_home else self.buffer)[self._own]

    @property
    def values(self) -> Tensor:
        """Return the gradient, in the buffer or in the home; undefined before the first accumulation."""
        if self._at_home:
            return self.homes[0]
        self.take()
        return self.buffer

    def take(self) -> None:
        """Allocate the buffer's memory if it has none; only its gaps are zeroed."""
        if not self.memory.here:
            self.memory.restore()
            self._zero_gaps(self.buffer)

    def zero_gaps(self) -> None:
        """Zero the gaps between parameters: a thin wire writes NaN to them if it lost the block."""
        self._zero_gaps(self.values)

    def _zero_gaps(self, of: Tensor) -> None:
        for begin, end in self._gaps:
            of[begin:end].zero_()

    def bring(self) -> None:
        """Copy the gradient from the home to the buffer, before more is accumulated or it is sent."""
        self.take()
        if self._at_home:
            self._mover.follow()
            self._mover.to_device(self.buffer, self.homes[0]).wait()
            self._at_home = False

    def rest(self) -> None:
        """Move the gradient to its home, if there is one, and release the buffer's memory."""
        if self.homes and not self._at_home:
            if self._read:
                self.homes.reverse()
                self._read = False
            self._mover.follow()
            self.arrived = self._mover.to_host(self.homes[0], self.buffer)
            self.memory.release()
            self._at_home = True

    def forget(self) -> None:
        """Drop the gradient."""
        self._at_home = False

    # -- at the update ---------------------------------------------------------------------------------------------

    def give(self) -> Tensor:
        """Return the own shard for an overlapped update; if updates are delayed, later gradients use homes[1]."""
        self._read = len(self.homes) > 1
        return self.own

    def lend_near(self) -> Tensor:
        """Return, on the device, the part of the own shard with optimizer states on the device."""
        if not self._at_home:
            return self.own[: self._near_numel]
        if self._near is None:
            self._near = self._space.transient(self._near_numel, torch.float32, "gradients")
        self._near.restore()
        self._mover.follow()
        self._mover.to_device(self._near.tensor, self.own[: self._near_numel]).wait()
        return self._near.tensor

    def drop_near(self) -> None:
        """Release the memory of :meth:`lend_near`."""
        if self._near is not None:
            self._near.release()
