from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from npuzero import _native


@pytest.fixture(autouse=True)
def _restored() -> Iterator[None]:
    """Whatever a test forces ends with it."""
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)
    _native.use_backend("native")
    _native.use_isa("auto")


@pytest.fixture(params=_native.supported_isas())
def isa(request: pytest.FixtureRequest) -> str:
    """Every built instruction set that this machine can run, in turn."""
    _native.use_isa(request.param)
    assert _native.isa() == request.param
    return str(request.param)
