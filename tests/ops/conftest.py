from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch

from npuzero import _native
from ops.emulated import Driver

# Set by `make test-aarch64`: the command that runs the kernels of another processor.
_DRIVER = os.environ.get("EMULATED_DRIVER", "").split()


@pytest.fixture(autouse=True)
def _restored() -> Iterator[None]:
    """Whatever a test forces ends with it."""
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)
    _native.use_backend("native")
    _native.use_isa("auto")


@pytest.fixture(scope="session")
def emulated() -> Iterator[Driver]:
    driver = Driver(_DRIVER)
    yield driver
    driver.close()


@pytest.fixture(params=["emulated"] if _DRIVER else _native.supported_isas())
def isa(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Every built instruction set that this machine can run, in turn; or the one that is emulated."""
    if request.param == "emulated":
        for name, function in request.getfixturevalue("emulated").functions().items():
            monkeypatch.setattr(_native, name, function)
    else:
        _native.use_isa(request.param)
        assert _native.isa() == request.param
    return str(request.param)
