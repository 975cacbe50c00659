"""The table of memory spaces: the only place to register a memory with the engine."""

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
    """Map each memory to its space. Each engine has separate spaces and counts.

    A part of the training state is allocated and counted in the memory of its :class:`~npuzero.plan.Placement`::

        spaces = MemorySpaces(world.device)
        states = spaces[plan.states.memory].allocate(numel, torch.float32, "states")
        buffer = spaces[Memory.DEVICE].transient(numel, dtype, "buffers")  # buffers to compute with: on the device
        spaces.peaks()  # {Memory.DEVICE: {"parameters": ..., "gradients": ..., "states": ..., "buffers": ...}}

    Args:
        device: where the rank computes.
        settings: NVMe folders and the limit of host memory.

    Attributes:
        mover: copies between the device and the host. The offloaded update has a separate one.
    """

    def __init__(self, device: torch.device, settings: Settings | None = None) -> None:
        self._device = device
        self._settings = settings or Settings()
        # Spaces are created on first use.
        self._spaces: dict[Memory, MemorySpace] = {Memory.DEVICE: DeviceSpace(device)}
        self.mover = HostCopier(device)

    @property
    def device(self) -> DeviceSpace:
        """Return the space of the device's memory."""
        return cast(DeviceSpace, self._spaces[Memory.DEVICE])

    @property
    def host(self) -> HostSpace:
        """Return the space of the host's memory."""
        if Memory.HOST not in self._spaces:
            reached = self._settings.update_on == "device"
            self._spaces[Memory.HOST] = HostSpace(self._device, self._settings.host_bytes, reached)
        return cast(HostSpace, self._spaces[Memory.HOST])

    def close_host(self) -> None:
        """Delete the space of the host's memory, which must be empty."""
        del self._spaces[Memory.HOST]

    @property
    def disk(self) -> DiskSpace:
        """Return the space of the disks."""
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
        """Reset the peaks of every memory to the bytes held now."""
        for space in self.values():
            space.reset_peak()
