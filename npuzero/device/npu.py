"""Ascend NPUs, through torch_npu, which is imported only when an npu is requested.

Emulated, binding tested (against the real torch_npu, over a fake of CANN's libraries); not yet run on NPU hardware.

The stream is fetched before every launch and never stored: fetching it drains torch_npu's host task queue. Otherwise a
kernel launched on the raw stream can overtake operators that torch issued before it.
"""

from __future__ import annotations

import ctypes
import importlib
import importlib.util
import weakref
from collections.abc import Iterable
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from npuzero.device.accelerator import Accelerator
from npuzero.device.device import Availability
from npuzero.errors import ConfigError

# The kernel driver's node, the same for every card; a process cannot use an NPU without it.
DRIVER = Path("/dev/davinci_manager")

# Locations of the version files of driver and firmware: the folder named by their installers, else the default one.
INSTALLED = Path("/etc/ascend_install.info")
USUAL = Path("/usr/local/Ascend")

# GB/s of HBM by prefix of the processor's name, from CANN's documents; not measured.
_NOMINAL_GBS = {"Ascend910B1": 1600, "Ascend910B2": 1600, "Ascend910B3": 1600}

# Formats with the memory order of a contiguous tensor; the remaining ones are tiled for the cube unit.
_PLAIN = ("ND", "NCHW", "NHWC", "NCDHW", "NCL")


# Functions that map host memory for kernels, as torch_npu does in empty_with_swapped_memory, and the value of
# ACL_HOST_REGISTER_MAPPED in CANN's aclrtHostRegisterType.
_MAP, _UNMAP, _MAPPED = "aclrtHostRegister", "aclrtHostUnregister", 0
_STORAGE, _TENSOR = "_construct_storage_from_data_pointer", "_construct_NPU_Tensor_From_Storage_And_Metadata"

#: Host memory mapped for the device: host begin address to (host end address, device begin address).
_open: dict[int, tuple[int, int]] = {}


def _load_ascendcl() -> ctypes.CDLL:
    return ctypes.CDLL("libascendcl.so")


def _unmap_memory(begin: int) -> None:
    del _open[begin]
    getattr(_load_ascendcl(), _UNMAP)(ctypes.c_void_p(begin))


def driver_versions() -> dict[str, str | None]:
    """Return the versions of ``driver`` and ``firmware`` as in their version files; None if not found."""
    return {part: _installed_version(part) for part in ("driver", "firmware")}


def _installed_version(part: str) -> str | None:
    named = _read_value(INSTALLED, f"{part.capitalize()}_Install_Path_Param")
    return _read_value((Path(named) if named else USUAL) / part / "version.info", "Version")


def _read_value(path: Path, key: str) -> str | None:
    """Return the value of ``key`` in a file of ``key=value`` lines; None without such a file or line."""
    try:
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return None
    return next((line.partition("=")[2].strip() for line in lines if line.startswith(f"{key}=")), None)


class Npu(Accelerator):
    kind = "npu"
    backend = "hccl"
    replays = False  # a replayed launch reads its table from memory that another launch has reused

    @classmethod
    def module(cls) -> ModuleType:
        """Return ``torch.npu``; imports torch_npu.

        Raises:
            ConfigError: torch_npu is missing, or cannot load CANN.
        """
        try:
            importlib.import_module("torch_npu")
        except Exception as error:  # any error: the import checks CANN's environment
            raise ConfigError(
                "device npu",
                expected="torch_npu, in the release for this torch, and CANN",
                got=f"{type(error).__name__}: {error}",
                do="Install torch_npu for torch "
                f"{torch.__version__.partition('+')[0]}, and source CANN's set_env.sh before starting Python. (Where "
                "torch_npu is installed without CANN, importing torch fails: TORCH_DEVICE_BACKEND_AUTOLOAD=0 helps.)",
            ) from error
        found: Any = torch
        module: ModuleType = found.npu
        return module

    @classmethod
    def available(cls) -> Availability:
        """Find the package and the driver; import torch_npu only if both exist."""
        if importlib.util.find_spec("torch_npu") is None:
            release = ".".join(torch.__version__.split(".")[:2])
            return Availability(False, "torch_npu is not installed", f"pip install 'torch_npu=={release}.*'.")
        if not DRIVER.exists():
            return Availability(False, f"no Ascend driver ({DRIVER} is missing)", "Install the driver, or map it in.")
        try:
            usable = bool(cls.module().is_available())
        except ConfigError as error:
            return Availability(False, error.got, error.do)
        if not usable:
            return Availability(False, "torch_npu finds no usable NPU", "Check npu-smi and ASCEND_RT_VISIBLE_DEVICES.")
        return Availability(True)

    def capability(self) -> str:
        facts: Any = self.module().get_device_properties(self.device)
        return f"{facts.name}, {facts.vector_core_num} vector cores, {facts.cube_core_num} cube cores"

    def facts(self) -> dict[str, Any]:
        torch_npu: Any = importlib.import_module("torch_npu")
        facts: Any = self.module().get_device_properties(self.device)
        return {
            **super().facts(),
            **driver_versions(),
            "soc": facts.name,
            "soc_version": int(torch_npu.npu.get_soc_version()),
            "vector_cores": facts.vector_core_num,
            "cube_cores": facts.cube_core_num,
            "inf_and_nan": bool(torch_npu.npu.utils.is_support_inf_nan()),
            "hf32": bool(self.module().matmul.allow_hf32),
            "nominal_gbs": next((gbs for name, gbs in _NOMINAL_GBS.items() if facts.name.startswith(name)), None),
        }

    def check(self, tensors: Iterable[torch.Tensor]) -> None:
        """Check that tensors have plain formats, that operators return only these, and that overflows give inf or nan.

        Raises:
            ConfigError: an internal format is in use or allowed, or the device saturates.
        """
        torch_npu: Any = importlib.import_module("torch_npu")
        if not torch_npu.npu.utils.is_support_inf_nan():
            raise ConfigError(
                f"device {self.name}",
                expected="overflows that show as inf and nan",
                got="saturation at the largest finite value, where an overflow cannot be told from a value",
                do="Unset INF_NAN_MODE_FORCE_DISABLE (and INF_NAN_MODE_ENABLE=0).",
            )
        if torch_npu._C._npu_getOption("ALLOW_INTERNAL_FORMAT") == b"enable":
            raise ConfigError(
                f"device {self.name}",
                expected="tensors in plain formats alone",
                got="torch.npu.config.allow_internal_format = True, by which operators may return tiled ones",
                do="Set torch.npu.config.allow_internal_format = False.",
            )
        for tensor in tensors:
            form = torch_npu.get_npu_format(tensor).name
            if form not in _PLAIN:
                raise ConfigError(
                    f"device {self.name}: a tensor of shape {tuple(tensor.shape)}",
                    expected=f"one of the formats {', '.join(_PLAIN)}",
                    got=form,
                    do="Call torch_npu.npu_format_cast(tensor, torch_npu.Format.ND) first.",
                )

    def check_reach(self) -> None:
        """Check for the CANN functions that map host memory, and the torch_npu functions that wrap an address."""
        torch_npu: Any = importlib.import_module("torch_npu")
        lacking = [name for name in (_MAP, _UNMAP) if not hasattr(_load_ascendcl(), name)]
        lacking += [name for name in (_STORAGE, _TENSOR) if not hasattr(torch_npu._C, name)]
        if lacking:
            raise ConfigError(
                "settings.update_on on npu",
                expected=f"a CANN and a torch_npu that have {', '.join((_MAP, _UNMAP, _STORAGE, _TENSOR))}",
                got=f"none of the name {', '.join(lacking)}",
                do="Leave update_on out: the host then updates what rests there; or take a later CANN and torch_npu.",
            )

    def open_host(self, memory: torch.Tensor) -> None:
        begin, there = memory.data_ptr(), ctypes.c_void_p()
        taken = ctypes.c_void_p(begin), ctypes.c_uint64(memory.nbytes)
        result = getattr(_load_ascendcl(), _MAP)(*taken, _MAPPED, ctypes.byref(there))
        if result != 0:
            raise ConfigError(
                "settings.update_on on npu",
                expected=f"{memory.nbytes:,} bytes of the host's memory that {_MAP} lets the device address",
                got=f"error {result}",
                do="Leave update_on out: the host then updates what rests there.",
            )
        _open[begin] = begin + memory.nbytes, there.value or 0
        weakref.finalize(memory.untyped_storage(), _unmap_memory, begin).atexit = False

    def reach(self, memory: torch.Tensor) -> torch.Tensor:
        at = memory.data_ptr()
        begin = next(begin for begin, (end, _) in _open.items() if begin <= at and at + memory.nbytes <= end)
        torch_npu: Any = importlib.import_module("torch_npu")
        facts = {
            "data_ptr": _open[begin][1] + at - begin,
            "nbytes": memory.nbytes,
            "size": memory.shape,
            "stride": memory.stride(),
            "dtype": memory.dtype,
            "device": self.device,
            "storage_offset": 0,
        }
        storage = getattr(torch_npu._C, _STORAGE)(facts["data_ptr"], facts["device"], facts["nbytes"])
        found: torch.Tensor = getattr(torch_npu._C, _TENSOR)(facts, storage)
        return found

    def set_matmul(self, matmul: str) -> None:
        """Set HF32, the cube units' counterpart of TF32."""
        module: Any = self.module()
        module.matmul.allow_hf32 = module.conv.allow_hf32 = matmul == "tf32"

    def current_stream_int(self) -> int:
        return int(self.module().current_stream(self.device).npu_stream)
