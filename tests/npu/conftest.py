from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from npu.emulated import Emulator
from npuzero import _native

Install = Callable[[Emulator], Emulator]


@pytest.fixture
def install(monkeypatch: pytest.MonkeyPatch) -> Install:
    """Puts an emulator's kernels behind the ops."""

    def put(emulator: Emulator) -> Emulator:
        torch.manual_seed(0)
        for name, function in emulator.functions().items():
            monkeypatch.setattr(_native, name, function)
        return emulator

    return put
