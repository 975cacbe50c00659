"""The table of memory spaces: the one place where a memory joins the engine."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import cast

import torch

from npuzero.config import Settings
from npuzero.memory.device import DeviceSpace
from npuzero.memory.disk import DiskSpace
from npuzero.memory.host import HostSpace
from npuzero.memory.mover import HostCopier
from npuzero.memory.space import MemorySpace
from npuzero.plan import Memory


class MemorySpaces(Mapping[Memory, MemorySpace]):
    """Map each memory to its space, with counts of its own for one engine.

    What a plan places is allocated where its :class:`~npuzero.plan.Placement` says, and counted there::

        spaces = Spaces(world.device)
        states = spaces[plan.states.memory].allocate(numel, torch.float32, "states")
        buffer = spaces[Memory.DEVICE].transient(numel, dtype, "buffers")  # what computes is always on the device
        spaces.peaks()  # {Memory.DEVICE: {"parameters": ..., "gradients": ..., "states": ..., "buffers": ...}}

    Args:
        device: where the rank computes.
        settings: folders, and what the host has room for.

    Attributes:
        mover: copies between the device and the host, but for those of the update, which has its own.
    """

    def __init__(self, device: torch.device, settings: Settings | None = None) -> None:
        self._device = device
        self._settings = settings or Settings()
        # Those in which something rests, made when it is first asked for.
        self._spaces: dict[Memory, MemorySpace] = {Memory.DEVICE: DeviceSpace(device)}
        self.mover = HostCopier(device)

    @property
    def device(self) -> DeviceSpace:
        """Return the space of the memory where the rank computes."""
        return cast(DeviceSpace, self._spaces[Memory.DEVICE])

    @property
    def host(self) -> HostSpace:
        """Return the space of the host's memory."""
        if Memory.HOST not in self._spaces:
            reached = self._settings.update_on == "device"
            self._spaces[Memory.HOST] = HostSpace(self._device, self._settings.host_bytes, reached)
        return cast(HostSpace, self._spaces[Memory.HOST])

    def close_host(self) -> None:
        """Forget the space of the host's memory, in which nothing rests any more."""
        del self._spaces[Memory.HOST]

    @property
    def disk(self) -> DiskSpace:
        """Return the space on disks."""
        if Memory.NVME not in self._spaces:
            self._spaces[Memory.NVME] = DiskSpace(self._settings)
        return cast(DiskSpace, self._spaces[Memory.NVME])

    def __getitem__(self, memory: Memory) -> MemorySpace:
        """Return the space of ``memory``."""
        if memory is Memory.DEVICE:
            return self._spaces[memory]
        return self.host if memory is Memory.HOST else self.disk

    def __contains__(self, memory: object) -> bool:
        return memory in tuple(Memory)

    def __iter__(self) -> Iterator[Memory]:
        return iter(self._spaces)

    def __len__(self) -> int:
        return len(self._spaces)

    def peaks(self) -> dict[Memory, dict[str, int]]:
        """Return the peak of each memory, in bytes by label, since :meth:`reset_peaks`."""
        return {memory: dict(space.peak) for memory, space in self.items()}

    def reset_peaks(self) -> None:
        """Restart the peaks of every memory at what is held now."""
        for space in self.values():
            space.reset_peak()
