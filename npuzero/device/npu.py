"""Ascend NPUs, through torch_npu, which is imported only when an npu is asked for. Not run on hardware in this version.

The stream is fetched before every launch and never kept: fetching it drains torch_npu's host task queue, without which
a kernel launched on the raw stream can overtake operators that torch issued before it.
"""

from __future__ import annotations

import importlib
import importlib.util
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from npuzero.device.accelerator import Accelerator
from npuzero.device.device import Availability
from npuzero.errors import ConfigError

# The kernel driver's node, the same for every card; a process cannot reach an NPU without it.
_DRIVER = Path("/dev/davinci_manager")


class Npu(Accelerator):
    kind = "npu"
    backend = "hccl"

    @classmethod
    def module(cls) -> ModuleType:
        """``torch.npu``; imports torch_npu.

        Raises:
            ConfigError: torch_npu is missing, or cannot load CANN.
        """
        try:
            importlib.import_module("torch_npu")
        except (ImportError, OSError) as error:
            raise ConfigError(
                "device npu",
                expected="torch_npu, in the release for this torch, and CANN",
                got=f"{type(error).__name__}: {error}",
                do="Install torch_npu for torch "
                f"{torch.__version__.partition('+')[0]}, and source CANN's set_env.sh before starting Python.",
            ) from error
        found: Any = torch
        module: ModuleType = found.npu
        return module

    @classmethod
    def available(cls) -> Availability:
        """Looks for the package and the driver; imports torch_npu only where both are there."""
        if importlib.util.find_spec("torch_npu") is None:
            return Availability(
                False, "torch_npu is not installed", "Install the torch_npu release for this torch: npuzero[npu]."
            )
        if not _DRIVER.exists():
            return Availability(False, f"no Ascend driver ({_DRIVER} is missing)", "Install the driver, or map it in.")
        try:
            usable = bool(cls.module().is_available())
        except ConfigError as error:
            return Availability(False, error.got, error.do)
        if not usable:
            return Availability(False, "torch_npu finds no usable NPU", "Check npu-smi and ASCEND_RT_VISIBLE_DEVICES.")
        return Availability(True)

    def capability(self) -> str:
        return str(self.module().get_device_name(self.device))

    def set_matmul(self, matmul: str) -> None:
        """HF32 is what the cube units have for TF32."""
        module: Any = self.module()
        module.matmul.allow_hf32 = module.conv.allow_hf32 = matmul == "tf32"

    def current_stream_int(self) -> int:
        return int(self.module().current_stream(self.device).npu_stream)
