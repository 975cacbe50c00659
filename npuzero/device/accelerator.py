"""The part shared by cuda and npu: torch has one module with the same functions for each."""

from __future__ import annotations

from abc import abstractmethod
from types import ModuleType

from npuzero.device.device import Device, Event, MemoryFigures


class Accelerator(Device):
    """Describe a device that runs asynchronously to the host, on streams."""

    @classmethod
    @abstractmethod
    def module(cls) -> ModuleType:
        """Return torch's module for the kind (``torch.cuda``, ``torch.npu``)."""

    @classmethod
    def count(cls) -> int:
        return int(cls.module().device_count()) if cls.available().ok else 0

    def make_event(self) -> Event:
        event: Event = self.module().Event()
        return event

    def capturing(self) -> bool:
        return bool(self.module().is_current_stream_capturing())

    def synchronize(self) -> None:
        self.module().synchronize(self.device)

    def memory(self) -> MemoryFigures:
        """Return the bytes that torch's allocator has allocated, not those it reserves."""
        module = self.module()
        _, total = module.mem_get_info(self.device)
        return MemoryFigures(
            int(module.memory_allocated(self.device)), int(module.max_memory_allocated(self.device)), int(total)
        )

    def trim(self) -> None:
        self.module().empty_cache()

    def reset_peak(self) -> bool:
        self.module().reset_peak_memory_stats(self.device)
        return True
