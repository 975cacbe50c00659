"""Devices: the CPU in full; cuda and npu as far as a machine without them can tell, and in full where there is one."""

from __future__ import annotations

import ctypes
import sys
from types import SimpleNamespace

import pytest
import torch

from npuzero import device
from npuzero.device.npu import Npu
from npuzero.errors import ConfigError

USABLE = [kind for kind, cls in device.KINDS.items() if cls.available().ok]
MISSING = [kind for kind in device.KINDS if kind not in USABLE]


@pytest.mark.parametrize("kind", USABLE)
def test_a_usable_device_tells_all_the_engine_asks(kind):
    found = device.get(f"{kind}:0" if kind != "cpu" else kind)
    assert found is device.get(found.name) and found.kind == kind
    assert found.backend == {"cpu": "gloo", "cuda": "nccl", "npu": "hccl"}[kind]
    assert found.count() >= 1 and found.capability()
    assert isinstance(found.current_stream_int(), int)
    event = found.make_event()
    event.record()
    event.wait()
    event.synchronize()
    assert event.query()
    found.synchronize()


@pytest.mark.parametrize("kind", USABLE)
def test_memory_figures_follow_an_allocation(kind):
    found = device.get(kind)
    if kind == "cpu":  # what other tests freed is resident still, and would serve the allocation
        ctypes.CDLL(None).malloc_trim(0)
    before = found.memory()
    reset = found.reset_peak()
    numel = 2**24
    held = torch.ones(numel, device=found.device)
    during = found.memory()
    del held
    assert during.allocated - before.allocated >= numel * 4 * 0.9
    assert during.peak >= during.allocated * 0.99
    assert during.total is None or during.total > during.allocated
    if reset:
        assert found.reset_peak()


@pytest.mark.parametrize("kind", MISSING)
def test_a_missing_device_says_why_and_what_to_do(kind):
    found = device.KINDS[kind].available()
    assert not found.ok and found.reason and found.do
    with pytest.raises(ConfigError) as raised:
        device.get(kind)
    assert raised.value.got == found.reason and raised.value.do == found.do


@pytest.mark.parametrize("word", ["xpu", "meta", "", "CPU", torch.device("meta")])
def test_an_unknown_kind_is_an_error(word):
    with pytest.raises(ConfigError, match="expected one of npu, cuda, cpu"):
        device.get(word)


def test_devices_are_the_same_object_by_device_and_by_name():
    assert device.get(torch.device("cpu")).name == device.get("cpu").name == "cpu"


@pytest.mark.skipif(USABLE != ["cpu"], reason="needs a machine with only a CPU")
def test_without_accelerators_the_cpu_is_chosen_for_any_rank():
    assert device.choose() == device.choose(5) == torch.device("cpu")


def test_more_processes_than_devices_is_an_error(monkeypatch):
    monkeypatch.setattr(device.KINDS["npu"], "available", classmethod(lambda cls: device.Availability(True)))
    monkeypatch.setattr(device.KINDS["npu"], "count", classmethod(lambda cls: 8))
    with pytest.raises(
        ConfigError, match="at most one process per npu device, of which this host has 8; got local rank 8"
    ):
        device.choose(8)


def test_torch_npu_that_cannot_load_is_a_config_error(monkeypatch):
    monkeypatch.setitem(sys.modules, "torch_npu", None)  # makes the import fail as a missing package does
    with pytest.raises(ConfigError, match="CANN"):
        Npu.module()


def test_one_setting_switches_the_matrix_units(monkeypatch):
    """The switches are torch's, and are there without the device."""
    switches = (torch.backends.cuda.matmul, torch.backends.cudnn)
    before = [switch.allow_tf32 for switch in switches]
    cuda = device.cuda.Cuda(torch.device("cpu"))
    for matmul in ("tf32", "ieee"):
        cuda.set_matmul(matmul)
        assert all(switch.allow_tf32 is (matmul == "tf32") for switch in switches)
        assert torch.get_float32_matmul_precision() == ("high" if matmul == "tf32" else "highest")  # for torch.compile
    for switch, allowed in zip(switches, before, strict=True):
        switch.allow_tf32 = allowed

    module = SimpleNamespace(matmul=SimpleNamespace(allow_hf32=None), conv=SimpleNamespace(allow_hf32=None))
    monkeypatch.setattr(Npu, "module", lambda _: module)
    for matmul in ("tf32", "ieee"):
        Npu(torch.device("cpu")).set_matmul(matmul)
        assert module.matmul.allow_hf32 is module.conv.allow_hf32 is (matmul == "tf32")


def test_a_cpu_refuses_modes_it_has_not():
    device.get("cpu").set_matmul("ieee")
    with pytest.raises(ConfigError, match="ieee"):
        device.get("cpu").set_matmul("tf32")


@pytest.mark.parametrize("name", ["cpu:1", "cpu:7", torch.device("cpu", 7)])
def test_the_cpu_is_one_device(name):
    with pytest.raises(ConfigError, match="expected cpu, which is one device; got 'cpu:"):
        device.get(name)
