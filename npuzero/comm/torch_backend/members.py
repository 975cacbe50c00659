"""Declare the state that the collectives of a process group share."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from npuzero.comm.communicator import Communicator
from npuzero.comm.torch_backend.tensors import After
from npuzero.comm.torch_backend.work import ShmWork
from npuzero.comm.world import World
from npuzero.device import AsyncHandle, HostLane


class ShmGroupBase:
    """Give a group's collectives access to its ranks.

    Attributes:
        _world: of the group's ranks.
        _group: the communicator of most collectives.
        _lane: runs operations that wait between several collectives.
    """

    _world: World
    _group: Communicator
    _lane: HostLane

    def _work(self, handles: Sequence[AsyncHandle], afters: Sequence[After], result: list[Tensor]) -> ShmWork:
        return ShmWork(self._lane, handles, afters, result)
