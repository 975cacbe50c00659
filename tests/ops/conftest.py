from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from npu.emulated import Emulator, default_emulator
from npuzero import _native
from npuzero.errors import KernelUnavailable
from ops.emulated import KernelDriver

# Set by `make test-aarch64` and `make test-cuda`: the command that runs the kernels of another processor or a GPU; by
# `make emulate`: that of an NPU.
_DRIVER = os.environ.get("EMULATED_DRIVER", "").split()
_NPU = os.environ.get("EMULATED_NPU", "")


@pytest.fixture(autouse=True)
def _restored() -> Iterator[None]:
    """Whatever a test forces ends with it, and kernels leave x86's old floating-point registers to others."""
    threads = torch.get_num_threads()
    yield
    assert ctypes.c_longdouble(1.5).value == 1.5
    torch.set_num_threads(threads)
    _native.use_backend("native")
    _native.use_isa("auto")


@pytest.fixture(scope="session")
def emulated() -> Iterator[KernelDriver | Emulator]:
    if _NPU:
        yield default_emulator()
    else:
        driver = KernelDriver(_DRIVER)
        yield driver
        driver.close()


#: The least and the best are in `make test`, what is between them in `make test-all`.
_ISAS = _native.supported_isas()
_BETWEEN = [pytest.param(isa, marks=pytest.mark.slow) for isa in _ISAS[1:-1]]


@pytest.fixture(params=["emulated"] if _DRIVER or _NPU else [*_ISAS[:1], *_BETWEEN, *_ISAS[1:][-1:]])
def isa(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Every built instruction set that this machine can run, in turn; or the one that is emulated."""
    if request.param == "emulated":
        for name, function in request.getfixturevalue("emulated").functions().items():
            monkeypatch.setattr(_native, name, _or_skip(function))
    else:
        _native.use_isa(request.param)
        assert _native.isa() == request.param
    return str(request.param)


def _or_skip(function: Callable[..., None]) -> Callable[..., None]:
    """What a device has no kernel for (docs/npu.md lists it) is not tested on it."""

    def call(*arguments: Any) -> None:
        try:
            function(*arguments)
        except KernelUnavailable as error:
            pytest.skip(error.got)

    return call
