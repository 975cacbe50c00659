from __future__ import annotations

import os
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch

from npuzero import _C, _native, ops
from npuzero.errors import ConfigError, KernelUnavailable
from npuzero.info import info
from npuzero.ops.reference import norm as reference


def run_python(program: str, **variables: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, **variables}
    command = [sys.executable, "-c", program]
    # Elsewhere: a checkout that is not built would hide the installed package.
    return subprocess.run(command, env=environment, cwd="/", capture_output=True, text=True, timeout=300)


FORCED = """
import torch
from npuzero import _native, ops
def refuse(*args): raise SystemExit("the kernel ran")
_native.norm = refuse
out = torch.empty(2, dtype=torch.float64)
ops.norm(torch.ones(3), out)
print(_native.backend(), _native.isa(), out.tolist())
"""


def test_environment_forces_backend_and_isa() -> None:
    worst = _native.built_isas()[0]
    done = run_python(FORCED, NPUZERO_BACKEND="reference", NPUZERO_ISA=worst)
    assert done.stdout.split("\n")[0] == f"reference {worst} [3.0, 0.0]", done.stderr
    assert "the kernel ran" in run_python(FORCED, NPUZERO_BACKEND="native").stderr


def test_environment_with_an_isa_this_machine_lacks_is_refused() -> None:
    lacking = [isa for isa in ("neon", "avx512") if isa not in _native.supported_isas()]
    done = run_python("import npuzero._native", NPUZERO_ISA=lacking[0])
    assert done.returncode != 0 and "ConfigError: NPUZERO_ISA: expected one of" in done.stderr


def test_native_is_the_default_and_the_reference_is_not_its_fallback(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise AssertionError("the reference ran")

    assert _native.backend() == "native"
    monkeypatch.setattr(reference, "reference_norm", refuse)
    out = torch.empty(2, dtype=torch.float64)
    ops.norm(torch.ones(3), out)
    assert out.tolist() == [3.0, 0.0]


def test_every_op_has_a_cpu_kernel() -> None:
    assert all("cpu" in devices for devices in _native.kernels().values())


def test_unknown_names_are_refused() -> None:
    with pytest.raises(ConfigError, match="expected one of native, reference; got 'fast'"):
        _native.use_backend("fast")
    with pytest.raises(ConfigError, match="expected one of auto"):
        _native.use_isa("mmx")


def test_a_device_without_kernels_says_so() -> None:
    with pytest.raises(KernelUnavailable, match="expected one of cpu, cuda, npu; got meta"):
        ops.norm(torch.empty(3, device="meta"), torch.empty(2, device="meta"))
    npu = _C.View(0, 0, 0, _native.DEVICES["npu"])
    room = torch.empty(2, dtype=torch.float64)
    out = _C.View(room.data_ptr(), 2, _native.DTYPES[torch.float64], _native.DEVICES["npu"])
    with pytest.raises(KernelUnavailable, match="norm: expected a kernel for npu") as caught:
        _C.norm(npu, out, out, None, 1.0, 0)
    assert caught.value.do


def test_streams_are_integers() -> None:
    assert _native.current_stream_handle(torch.device("cpu")) == 0


def test_two_openmp_runtimes_are_warned_of_and_told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    line = "7f00-7f01 r-xp 00000000 08:01 123                        {}\n"
    two = ["/a/torch/lib/libgomp.so.1", "/usr/lib/libgomp.so.1.0.0"]
    maps = tmp_path / "maps"
    monkeypatch.setattr(_native, "MAPS", maps)
    for loaded, found in ((two[:1] * 2, two[:1]), (two, two)):
        paths = [*loaded, "/usr/lib/libc.so.6", "/usr/lib/libcompute.so"]
        maps.write_text("".join(map(line.format, paths)) + "7f00-7f01 rw-p 0 00:00 0\n")
        assert _native.openmp_libraries() == found
        told = [item for item in info()["missing"] if "OpenMP" in item["what"]]
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            _native.warn_if_two_openmps()
        assert len(told) == len(caught) == len(found) - 1
    assert all(path in str(caught[0].message) and path in told[0]["why"] for path in two)
    maps.unlink()
    assert _native.openmp_libraries() == []


def test_threads_are_torchs() -> None:
    assert len(_native.openmp_libraries()) == 1
