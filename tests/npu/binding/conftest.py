"""The real torch_npu over the fake device. Run by `make test-torch-npu`, which installs torch_npu apart and says so."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from npu.fake import libraries

#: Set by whoever runs these tests: torch_npu, where there is one, is not the one of an installation with CANN.
BOUND = os.environ.get("FAKE_NPU") == "1" and importlib.util.find_spec("torch_npu") is not None

if BOUND:
    libraries.build_fake_cann()
    libraries.load_fake_cann()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if not BOUND:
        here = Path(__file__).parent
        why = pytest.mark.skip(reason="the real torch_npu over a fake device: make test-torch-npu")
        for item in items:
            if here in item.path.parents:
                item.add_marker(why)


@pytest.fixture
def npu(monkeypatch: pytest.MonkeyPatch) -> Iterator[object]:
    """npuzero's device, with a driver to be found."""
    from npuzero import device
    from npuzero.device import npu as module

    monkeypatch.setattr(module, "DRIVER", Path(os.devnull))
    device.get.cache_clear()
    yield device.get("npu:0")
    device.get.cache_clear()
