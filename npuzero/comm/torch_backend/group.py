"""Define the process group: its start and end, and torch's requests other than collectives."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from npuzero.comm.process_world import ProcessWorld
from npuzero.comm.torch_backend.movements import MovementCollectives
from npuzero.comm.torch_backend.reductions import ReductionCollectives
from npuzero.comm.torch_backend.tensors import NAME
from npuzero.comm.watchdog import fork
from npuzero.device import HostLane

# torch's stubs know the many ways to call a group; torch itself passes options.
_ProcessGroup: Any = dist.ProcessGroup


class ShmGroup(MovementCollectives, ReductionCollectives, _ProcessGroup):  # type: ignore[misc]
    """Serve one rank of a process group over shared memory. torch.distributed calls these methods.

    Raises:
        ConfigError: the ranks do not share a host.
        CollectiveError: the ranks did not find each other.
    """

    def __init__(self, store: Any, rank: int, size: int, timeout: timedelta) -> None:
        super().__init__(rank, size)
        self._world = ProcessWorld(
            store, rank, size, torch.device("cpu"), backend="shm", timeout_s=timeout.total_seconds()
        )
        self._group = self._world.communicator(range(size), "ops")
        self._lane = HostLane("shm", fork.make_fork_check("shm"))
        self._name = ""
        self._group.barrier()  # all ranks have opened it before any may end

    def getBackendName(self) -> str:
        return NAME

    def getGroupName(self) -> str:
        self._name = str(dist.distributed_c10d._world.pg_names.get(self, self._name))
        return self._name

    @property
    def group_name(self) -> Any:
        return self.getGroupName()

    def shutdown(self) -> None:
        self.getGroupName()  # torch forgets the name, and asks for it once more later
        self._lane.close(timeout_s=1.0)
        self._world.close()

    def abort(self) -> None:
        self.getGroupName()
        self._world.abort("torch.distributed aborted the group")
