"""NVIDIA GPUs, through torch.cuda. Run on one H100; not yet over several GPUs (docs/cuda.md)."""

from __future__ import annotations

from types import ModuleType

import torch

from npuzero.device.accelerator import Accelerator
from npuzero.device.device import Availability


class Cuda(Accelerator):
    kind = "cuda"
    backend = "nccl"

    @classmethod
    def module(cls) -> ModuleType:
        return torch.cuda

    @classmethod
    def available(cls) -> Availability:
        if torch.version.cuda is None:
            return Availability(False, "this torch was built without CUDA", "Install a CUDA build of torch.")
        if not torch.cuda.is_available():
            return Availability(
                False,
                "torch finds no usable NVIDIA driver or device",
                "Check nvidia-smi, the driver's version, and CUDA_VISIBLE_DEVICES.",
            )
        return Availability(True)

    def capability(self) -> str:
        facts = torch.cuda.get_device_properties(self.device)
        return f"{facts.name}, compute capability {facts.major}.{facts.minor}, {facts.multi_processor_count} SMs"

    def set_matmul(self, matmul: str) -> None:
        """Set torch's older switches: after its newer ones are used, torch.compile cannot read the setting."""
        torch.backends.cuda.matmul.allow_tf32 = matmul == "tf32"
        torch.backends.cudnn.allow_tf32 = matmul == "tf32"

    def reach(self, memory: torch.Tensor) -> torch.Tensor:
        """Return a tensor at the same address: the device addresses pinned memory directly (unified addressing)."""
        return torch.as_tensor(_PinnedMemory(memory), device=self.device).view(memory.dtype)

    def current_stream_int(self) -> int:
        return torch.cuda.current_stream(self.device).cuda_stream


class _PinnedMemory:
    """Present a pinned tensor's bytes as device memory (``__cuda_array_interface__``, as in numba and CuPy)."""

    def __init__(self, memory: torch.Tensor) -> None:
        self.memory = memory
        self.__cuda_array_interface__ = {
            "shape": (memory.nbytes,),
            "typestr": "|u1",
            "data": (memory.data_ptr(), False),
            "version": 2,
        }
