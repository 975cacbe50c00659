"""Tensors, streams and events of the real torch_npu on the fake device, and npuzero's device layer over them."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys

import pytest
import torch

from npu.fake import libraries
from npuzero import device as devices
from npuzero.errors import ConfigError, OutOfSpace
from npuzero.info import info
from npuzero.memory import DeviceSpace


def npu_arange(*shape: int) -> torch.Tensor:
    numel = torch.Size(shape).numel()
    return torch.arange(float(numel)).view(shape).to("npu:0")


def run_fake_npu_code(code: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """A process of its own: after an operator's error torch_npu does nothing more, and with other settings."""
    head = "from npu.fake import libraries; libraries.load_fake_cann()\nimport torch, torch_npu\n"
    paths = [str(libraries.ROOT / "tests"), os.environ.get("PYTHONPATH", "")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), **variables}
    command = [sys.executable, "-c", head + code]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)


def test_values_go_there_and_back(npu):
    tensor = npu_arange(4, 5)
    assert str(tensor.device) == "npu:0" and tensor.is_contiguous()
    assert torch.equal(tensor.cpu(), torch.arange(20.0).view(4, 5))
    assert torch.equal(tensor[1:3].cpu(), torch.arange(5.0, 15.0).view(2, 5))  # a view keeps its place
    other = torch.empty_like(tensor)
    other.copy_(tensor)
    assert torch.equal(other.cpu(), tensor.cpu()) and other.data_ptr() != tensor.data_ptr()
    pinned = torch.arange(20.0).pin_memory()
    there = pinned.to("npu:0", non_blocking=True)
    torch.npu.synchronize()
    assert torch.equal(there.cpu(), pinned)


def test_fresh_memory_is_not_zero(npu):
    assert torch.empty(1 << 26, device="npu:0").cpu().ne(0).all()


def test_what_is_not_served_fails():
    """Or else an operator would do nothing and every test of it pass."""
    done = run_fake_npu_code("x = torch.ones(3).npu() + 1\ntorch.npu.synchronize()\nprint(x.cpu())")
    assert done.returncode != 0 and "is not served by the fake device" in done.stderr


def test_a_storage_comes_and_goes_under_its_views(npu):
    flat = torch.empty(1024, device="npu:0")
    view, storage = flat[100:200], flat.untyped_storage()
    for value in (1.0, 2.0):
        storage.resize_(4096)
        flat.copy_(torch.full((1024,), value))
        assert torch.equal(view.cpu(), torch.full((100,), value))
        assert view.data_ptr() == flat.data_ptr() + 400
        storage.resize_(0)
        assert storage.nbytes() == 0


def test_the_engine_takes_the_stream_that_is_current(npu):
    main = npu.current_stream_int()
    side = torch.npu.Stream()
    with torch.npu.stream(side):
        assert npu.current_stream_int() == side.npu_stream != main
    assert npu.current_stream_int() == main


def test_fetching_the_stream_drains_the_host_queue(npu):
    """What is then put on the raw stream comes after all that torch was told before."""
    memset = ctypes.CDLL("libascendcl.so").aclrtMemsetAsync
    memset.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int32, ctypes.c_size_t, ctypes.c_void_p]
    words = 1 << 16
    for _ in range(3):
        source, target = torch.ones(words).npu(), torch.zeros(words).npu()
        for _ in range(200):
            target.copy_(source)
        assert memset(target.data_ptr(), 4 * words, 0, 4 * words, npu.current_stream_int()) == 0
        assert not target.cpu().any()


SIDE = """
main, side = torch.npu.current_stream(), torch.npu.Stream()
for waits in (True, False):
    source, target, other = torch.ones(1000).npu(), torch.zeros(1000).npu(), torch.empty(1000, device="npu")
    torch.npu.synchronize()
    with torch.npu.stream(side):
        for _ in range(5):
            other.copy_(source, non_blocking=True)
        target.copy_(source, non_blocking=True)
        event = torch.npu.Event()
        event.record(side)
    if waits:
        main.wait_event(event)
    copy = torch.empty(1000).pin_memory()
    copy.copy_(target, non_blocking=True)
    main.synchronize()
    print(int(copy.sum()))
    torch.npu.synchronize()
"""


def test_events_order_streams():
    """The fake's streams are real queues: who does not wait comes too early."""
    assert run_fake_npu_code(SIDE, FAKE_NPU_DELAY_US="20000").stdout.split()[-2:] == ["1000", "0"]


def test_what_the_engine_asks_of_a_device(npu):
    assert npu.backend == "hccl" and npu.count() == 8
    assert npu.capability() == "Ascend910B1, 48 vector cores, 24 cube cores"
    event = npu.make_event()
    event.record()
    event.wait()
    event.synchronize()
    assert event.query()
    npu.synchronize()
    before = npu.memory()
    assert npu.reset_peak()
    held = torch.empty(1 << 20, device="npu:0")
    during = npu.memory()
    assert during.allocated - before.allocated >= held.nbytes and during.peak >= during.allocated
    assert during.total == 4 << 30


def test_hf32_is_the_setting_for_tf32(npu):
    for matmul, on in (("tf32", True), ("ieee", False)):
        npu.set_matmul(matmul)
        assert torch.npu.matmul.allow_hf32 is on and torch.npu.conv.allow_hf32 is on


def test_npuzero_finds_the_device(npu):
    assert devices.choose(3) == torch.device("npu", 3)
    facts = info()
    assert facts["devices"]["npu"]["available"] and len(facts["devices"]["npu"]["devices"]) == 8
    assert facts["collectives"]["npu"] == {"backends": ["hccl"], "wanted": "hccl"}
    assert facts["versions"]["torch_npu"].startswith("2.13.0")


def test_plain_formats_are_fine(npu):
    npu.check([npu_arange(4), npu_arange(2, 3, 4, 4)])


def test_internal_formats_are_refused(npu, monkeypatch):
    torch.npu.config.allow_internal_format = True
    with pytest.raises(ConfigError, match="allow_internal_format = False"):
        npu.check([])
    torch.npu.config.allow_internal_format = False
    npu.check([])

    class Tiled:
        name = "FRACTAL_NZ"

    monkeypatch.setattr("torch_npu.get_npu_format", lambda tensor: Tiled)
    with pytest.raises(ConfigError, match=r"got FRACTAL_NZ\. Call torch_npu\.npu_format_cast"):
        npu.check([npu_arange(4)])


CHECK = """
from npuzero.device.npu import Npu
torch.npu.set_device(0)
try:
    Npu(torch.device("npu:0")).check([])
except Exception as error:
    print(error)
"""


@pytest.mark.slow
def test_saturation_is_refused():
    """An overflow that saturates cannot be told from a value: scaling and clipping would go wrong in silence."""
    refused = run_fake_npu_code(CHECK, INF_NAN_MODE_FORCE_DISABLE="1").stdout
    assert "expected overflows that show as inf and nan; got saturation" in refused


@pytest.mark.slow
def test_half_an_environment_of_cann_is_a_config_error():
    code = "import npuzero, npuzero.device.npu\ntry: npuzero.device.npu.Npu.module()\n"
    code += "except npuzero.ConfigError as error: print(error)"
    paths = [str(libraries.ROOT / "tests"), os.environ.get("PYTHONPATH", "")]
    variables = {**os.environ, "ASCEND_HOME_PATH": str(libraries.CANN), "PYTHONPATH": os.pathsep.join(paths)}
    command = [sys.executable, "-c", f"from npu.fake import libraries; libraries.load_fake_cann()\n{code}"]
    done = subprocess.run(command, env=variables, capture_output=True, text=True, timeout=300)
    assert "ASCEND_OPP_PATH" in done.stdout and "set_env.sh" in done.stdout, done.stderr


def test_a_full_device_is_out_of_space(npu):
    with pytest.raises(OutOfSpace) as raised:
        DeviceSpace(npu.device).allocate(1 << 40, torch.float32, "states")
    assert raised.value.facts["nbytes"] == 4 << 40
