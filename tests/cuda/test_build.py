"""The cuda kernels in the extension: for which GPUs they are, and that the module loads where there is none."""

from __future__ import annotations

import os
import struct
import subprocess
import sys
from pathlib import Path

import pytest

from npuzero import _C, _native

_MAGIC = b"\x50\xed\x55\xba"  # of a fat binary; then version u16, bytes of the header u16, bytes of the entries u64
_CODE = {1: "compute", 2: "sm"}  # an entry's kind: PTX, or a binary


def _fatbin_architectures(module: bytes) -> set[str]:
    """What is in the fat binaries of an extension module, by the headers of their entries: "sm_90", "compute_100"."""
    found = set()
    at = module.find(_MAGIC)
    while at >= 0:
        _, header, size = struct.unpack_from("<HHQ", module, at + 4)
        entry, end = at + header, at + header + size
        while entry < end:
            kind, _, entry_header, payload = struct.unpack_from("<HHIQ", module, entry)
            (architecture,) = struct.unpack_from("<I", module, entry + 28)
            found.add(f"{_CODE[kind]}_{architecture}")
            entry += entry_header + payload
        at = module.find(_MAGIC, end)
    return found


needs_kernels = pytest.mark.skipif(
    "cuda" not in _native.kernels()["cast"], reason="this build has no cuda kernels: nvcc was not found"
)


@needs_kernels
def test_every_op_has_a_cuda_kernel() -> None:
    assert all("cuda" in devices for devices in _native.kernels().values())


@needs_kernels
def test_binaries_for_the_gpus_people_have_and_code_for_later_ones() -> None:
    found = _fatbin_architectures(Path(_C.__file__).read_bytes())
    assert {"sm_80", "sm_90"} <= found, found
    assert any(name.startswith("compute_") for name in found), found


@needs_kernels
def test_nothing_of_cuda_is_needed_to_load_the_module() -> None:
    needed = subprocess.run(["ldd", _C.__file__], capture_output=True, text=True, check=True).stdout
    assert "libcuda" not in needed and "libcudart" not in needed, needed
    program = "import npuzero; from npuzero import _native; assert 'cuda' in _native.kernels()['pack']"
    subprocess.run([sys.executable, "-c", program], check=True, env={**os.environ, "CUDA_VISIBLE_DEVICES": ""})
