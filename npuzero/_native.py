"""The only importer of npuzero._C. Tensors become views, streams become integers; nothing else crosses.

torch is imported first, so that _C finds torch's libgomp already loaded and shares its thread pool.
"""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import torch

from npuzero import device as devices
from npuzero.config import read_environment
from npuzero.device import kernels as npu_kernels
from npuzero.errors import ConfigError, CoreMissing, KernelUnavailable

try:
    from npuzero import _C
except ImportError as error:
    raise CoreMissing(
        "npuzero._C",
        expected="the compiled core beside the Python files",
        got=str(error),
        do="Install with `pip install .`, or in a checkout `pip install -e .`; it needs a C++17 compiler only. Where a "
        "library of the system is missing, install that; libgomp.so.1 comes with most builds of torch, and with gcc.",
    ) from error

# The integers of csrc/core/view.h.
DTYPES: dict[torch.dtype, int] = {
    torch.float32: 0,
    torch.bfloat16: 1,
    torch.float16: 2,
    torch.float64: 3,
    torch.int32: 4,
    torch.int64: 5,
    torch.uint8: 6,
    torch.int16: 7,
}
DEVICES: dict[str, int] = {"cpu": 0, "cuda": 1, "npu": 2}
BACKENDS = ("native", "reference")

# One function per op, and descriptions of the build.
cast, flat_adam, flat_lion, norm, pack = _C.cast, _C.flat_adam, _C.flat_lion, _C.norm, _C.pack
quantize, dequantize_sum = _C.quantize, _C.dequantize_sum
message_bytes, overlap = _C.message_bytes, _C.overlap
kernels, isa, built_isas, supported_isas, use_isa = (
    _C.kernels,
    _C.isa,
    _C.built_isas,
    _C.supported_isas,
    _C.use_isa,
)
npu_library, npu_launches = _C.npu_kernels, _C.npu_launches
NORM_BLOCK: int = _C.norm_block()
# Collectives between the ranks of one host; npuzero.comm.backends.shared_memory is their Python side.
comm: Any = _C.comm
# Host memory with pages that are committed and released; npuzero.memory.space is its Python side.
host: Any = _C.host
# Bytes in unnamed files on disks; npuzero.memory.file is its Python side.
io: Any = _C.io


def tensor_view(tensor: torch.Tensor) -> _C.View:
    """Return pointer, count, dtype and device of a contiguous tensor. The caller must keep the tensor alive.

    Raises:
        KernelUnavailable: the tensor is on a device that no build has kernels for.
    """
    return _C.View(tensor.data_ptr(), tensor.numel(), DTYPES[tensor.dtype], device_kind(tensor.device))


def optional_view(tensor: torch.Tensor | None) -> _C.View | None:
    """Return ``tensor_view(tensor)``, or None for None."""
    return None if tensor is None else tensor_view(tensor)


def device_kind(device: torch.device) -> int:
    """Return the integer that identifies the device in C++.

    Raises:
        KernelUnavailable: the device type is unknown to C++.
    """
    kind = DEVICES.get(device.type)
    if kind is None:
        raise KernelUnavailable(
            "device",
            expected=f"one of {', '.join(DEVICES)}",
            got=device.type,
            do="Move the tensors there, or set NPUZERO_BACKEND=reference.",
        )
    return kind


def current_stream_handle(device: torch.device) -> int:
    """Return the device's current stream as an integer; 0 on the CPU, where kernels run before the call returns."""
    return devices.get(device).current_stream_int()


def backend() -> str:
    """Return the backend that runs the ops: ``"native"`` kernels, or ``"reference"`` if NPUZERO_BACKEND=reference."""
    return _backend


def use_backend(name: str) -> None:
    """Set the backend at run time, as NPUZERO_BACKEND does at import.

    Raises:
        ConfigError: no such backend.
    """
    global _backend
    if name not in BACKENDS:
        raise ConfigError("backend", expected=f"one of {', '.join(BACKENDS)}", got=repr(name), do="Name one of these.")
    _backend = name


def openmp_libraries() -> list[str]:
    """Return the paths of the OpenMP runtimes in this process; empty if unknown (not Linux).

    One is correct: torch and the kernels share its thread pool. Two compete for the same cores.
    """
    try:
        lines = MAPS.read_text().splitlines()
    except OSError:
        return []
    paths = {line.split(maxsplit=5)[-1] for line in lines if "omp" in line and ".so" in line}
    return sorted(path for path in paths if Path(path).name.startswith(("libgomp", "libomp", "libiomp")))


def warn_if_two_openmps() -> None:
    found = openmp_libraries()
    if len(found) > 1:
        warnings.warn(
            f"{len(found)} OpenMP runtimes in one process ({', '.join(found)}): their threads compete for the same "
            "cores, which can make a kernel hundreds of times slower, and torch.set_num_threads reaches but one of "
            f"them. {ONE_OPENMP}",
            RuntimeWarning,
            stacklevel=2,
        )


MAPS = Path("/proc/self/maps")
ONE_OPENMP = "Import torch before other packages that bring one, and build npuzero with the system's libgomp."
_C.use_npu_kernels(str(npu_kernels.find_library() or ""))
_environment = read_environment()
_backend = _environment.backend
use_isa(_environment.isa)
warn_if_two_openmps()
