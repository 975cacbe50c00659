"""NVIDIA GPUs, through torch.cuda. Not run on hardware in this version."""

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
        """By the switches that torch had first: with its newer ones, torch.compile cannot read what is set."""
        torch.backends.cuda.matmul.allow_tf32 = matmul == "tf32"
        torch.backends.cudnn.allow_tf32 = matmul == "tf32"

    def current_stream_int(self) -> int:
        return torch.cuda.current_stream(self.device).cuda_stream
