"""npuzero's ops on npu tensors: the host's part of a launch over the fake device, the kernels in the emulator."""

from __future__ import annotations

import ctypes
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import npuzero
from npu.binding.test_device import run_fake_npu_code as in_process
from npu.fake import libraries
from npuzero import _C, _native, ops
from npuzero.errors import KernelUnavailable, StateError
from npuzero.ops.flat_adam import AdamSegment

NUMELS = (1, 77, 5000, 100_003)


@pytest.fixture(autouse=True)
def kernels(npu) -> Iterator[None]:
    before = _native.npu_library()
    _C.use_npu_kernels(str(libraries.build_fake_kernels()))
    yield
    _C.use_npu_kernels(before)


def to_npu(*tensors: torch.Tensor) -> list[torch.Tensor]:
    return [tensor.to("npu:0") for tensor in tensors]


def test_casts_and_packs_equal_the_cpu_s():
    for numel in NUMELS:
        source, low = torch.randn(numel), torch.empty(numel, dtype=torch.bfloat16)
        far, far_low = to_npu(source, low)
        ops.cast(source, low)
        ops.cast(far, far_low)
        assert torch.equal(far_low.cpu(), low)
        wire, far_wire = torch.empty(3 * numel), torch.empty(3 * numel, device="npu:0")
        ops.pack([source, low, source], [0, numel, 2 * numel], wire, scale=0.125)
        ops.pack([far, far_low, far], [0, numel, 2 * numel], far_wire, scale=0.125)
        assert torch.equal(far_wire.cpu(), wire)


def test_norms_equal_the_cpu_s_as_float32():
    for numel in NUMELS:
        x, out = torch.randn(numel), torch.empty(2, dtype=torch.float64)
        far, far_out = to_npu(x, out)
        ops.norm(x, out)
        ops.norm(far, far_out)
        assert torch.equal(far_out.cpu().float(), out.float())


def test_an_update_equals_the_cpu_s():
    for numel in NUMELS:
        state = [torch.randn(numel), torch.randn(numel) * 0.1, torch.rand(numel) * 0.01]
        grad, low = torch.randn(numel).bfloat16(), torch.empty(numel, dtype=torch.bfloat16)
        hyper = {"lr": 1e-2, "beta1": 0.9, "beta2": 0.99, "eps": 1e-8, "weight_decay": 0.1, "step": 3}
        segments = [AdamSegment(0, numel, **hyper, decoupled=True, maximize=False, amsgrad=False)]
        far_state, (far_grad, far_low) = to_npu(*state), to_npu(grad, low)
        ops.flat_adam(*state, grad, segments, low=low)
        ops.flat_adam(*far_state, far_grad, segments, low=far_low)
        for mine, other in zip([*far_state, far_low], [*state, low], strict=True):
            assert torch.equal(mine.cpu(), other)


@pytest.mark.parametrize("bits", [8, 4])
def test_what_goes_over_a_thin_wire_equals_the_cpu_s(bits):
    for blocks in (1, 40):
        numel = 3 * 256 * blocks
        source, residual = torch.randn(numel).bfloat16(), torch.randn(numel) * 0.01
        message = torch.zeros(3 * _C.message_bytes(256 * blocks, bits), dtype=torch.uint8)
        out = torch.randn(numel)
        far_source, far_residual, far_message, far_out = to_npu(source, residual, message, out)
        ops.quantize(source, message, bits=bits, pieces=3, residual=residual)
        ops.quantize(far_source, far_message, bits=bits, pieces=3, residual=far_residual)
        ops.dequantize_sum(message, out[: 256 * blocks], bits=bits, rows=3, accumulate=True)
        ops.dequantize_sum(far_message, far_out[: 256 * blocks], bits=bits, rows=3, accumulate=True)
        for mine, other in ((far_message, message), (far_residual, residual), (far_out, out)):
            assert torch.equal(mine.cpu(), other)


def test_many_launches_on_several_streams():
    """Tables are lent until their launch is done: none is overwritten by a later one."""
    streams = [torch.npu.Stream() for _ in range(3)]
    sources = to_npu(*(torch.full((2000 + k,), float(k)) for k in range(60)))
    targets = [torch.empty(2000 + k, dtype=torch.bfloat16, device="npu:0") for k in range(60)]
    torch.npu.synchronize()
    for k, (source, target) in enumerate(zip(sources, targets, strict=True)):
        with torch.npu.stream(streams[k % 3]):
            ops.cast(source, target)
    torch.npu.synchronize()
    for k, target in enumerate(targets):
        assert target.cpu().eq(k).all(), k


def test_a_table_that_comes_again_is_not_sent_again():
    copies = ctypes.CDLL("libascendcl.so").fakeAsyncCopies
    copies.restype = ctypes.c_int64
    sources = to_npu(*(torch.randn(2000 + k) for k in range(3)))
    targets = [torch.empty(source.numel(), dtype=torch.bfloat16, device="npu:0") for source in sources]
    ops.cast(*to_npu(torch.ones(3), torch.ones(3)))  # the first use sends tables of its own
    torch.npu.synchronize()
    before = copies()
    for _ in range(5):
        for source, target in zip(sources, targets, strict=True):
            ops.cast(source, target)
    assert copies() - before == len(sources)
    for source, target in zip(sources, targets, strict=True):
        assert torch.equal(target.cpu(), source.cpu().bfloat16())


def test_many_tables_take_turns():
    """More than are kept; those of before come again, in another order."""
    source, target = to_npu(torch.arange(700.0), torch.empty(700))
    for numel in (*range(1, 601), *range(600, 0, -3)):
        ops.cast(source[:numel], target[:numel])
    assert torch.equal(target.cpu()[:600], torch.arange(600.0))


def test_a_graph_that_captures_an_op_is_refused():
    """It would replay the launch with whatever its table's place on the device holds by then."""
    source, target, low = to_npu(torch.arange(9.0), torch.zeros(9), torch.zeros(9).bfloat16())
    graph = torch.npu.NPUGraph()
    with torch.npu.graph(graph):
        target.copy_(source)
        with pytest.raises(StateError, match=r"cast on npu: .* captured"):
            ops.cast(source, low)
    graph.replay()
    torch.npu.synchronize()
    assert torch.equal(target.cpu(), source.cpu())  # what is not npuzero's is captured as ever
    ops.cast(source, low)
    assert torch.equal(low.cpu(), source.cpu().bfloat16())


@pytest.mark.parametrize("capturable", [False, True])
def test_a_graph_that_captures_a_step_is_refused_before_anything_is_counted(capturable):
    value, grad = to_npu(torch.arange(9.0), torch.ones(9))
    parameter = torch.nn.Parameter(value)
    parameter.grad = grad
    optimizer = npuzero.AdamW([parameter], lr=0.1, capturable=capturable)
    with torch.npu.graph(torch.npu.NPUGraph()), pytest.raises(StateError, match=r"on npu.*outside of the capture"):
        optimizer.step()
    torch.npu.synchronize()
    assert torch.equal(parameter.detach().cpu(), torch.arange(9.0)) and not optimizer.state


ANOTHER_STREAM = """
from npuzero import _C, ops
from npuzero.device import npu
npu.DRIVER = __import__("pathlib").Path("/dev/null")
_C.use_npu_kernels({kernels!r})
torch.npu.set_device(0)
source, target = torch.arange(1000.0).npu(), torch.empty(1000, dtype=torch.bfloat16, device="npu")
torch.npu.synchronize()
with torch.npu.stream(torch.npu.Stream()):
    other = torch.empty(1000, device="npu")
    for _ in range(10):
        other.copy_(source, non_blocking=True)
    ops.cast(source, target)
ops.cast(source, target)
torch.npu.current_stream().synchronize()
copy = torch.empty(1000, dtype=torch.bfloat16).pin_memory()
copy.copy_(target, non_blocking=True)
torch.npu.current_stream().synchronize()
print(torch.equal(copy, torch.arange(1000.0).bfloat16()))
torch.npu.synchronize()
"""


def test_a_table_that_another_stream_waits_for_is_sent_again():
    done = in_process(ANOTHER_STREAM.format(kernels=str(libraries.build_fake_kernels())), FAKE_NPU_DELAY_US="20000")
    assert done.stdout.split()[-1:] == ["True"], done.stderr


def test_a_launch_comes_after_what_torch_was_told():
    target = torch.empty(1 << 16, dtype=torch.bfloat16, device="npu:0")
    source, new = to_npu(torch.zeros(1 << 16), torch.ones(1 << 16))
    for _ in range(50):
        source.copy_(new)
    ops.cast(source, target)
    assert target.cpu().eq(1).all()


# A launch function as CANN before 9.0 generates it, where its kernel was not registered; and one that goes wrong.
OPS = ("cast", "pack", "norm", "flat_adam", "flat_lion", "quantize", "dequantize_sum")
UNREGISTERED = """
extern "C" int puts(const char*);
extern "C" uint32_t aclrtlaunch_{kernel}(uint32_t, void*, void*) {{ puts("not registered"); return 0; }}
"""
WRONG_NORM = """
extern "C" int aclrtMemsetAsync(void*, size_t, int32_t, size_t, void*);
extern "C" int aclrtSynchronizeStream(void*);
extern "C" uint32_t aclrtlaunch_npuzero_norm(uint32_t, void* stream, void* table) {
  aclrtSynchronizeStream(stream);
  void* out = reinterpret_cast<void*>(static_cast<npuzero::npu::NormHead*>(table)->out);
  return aclrtMemsetAsync(out, 16, 0, 16, stream);
}
"""


def broken_kernels(folder: Path, functions: str) -> str:
    """The kernels' library, but for these functions of it."""
    source, library = folder / "broken.cpp", folder / "libnpuzero_kernels.so"
    source.write_text('#include "npu/table.h"\n#include <cstddef>\n' + functions)
    options = [f"-I{libraries.ROOT / 'csrc'}", "-shared", "-fPIC", "-Wl,--no-as-needed"]
    subprocess.run(["g++", *options, str(source), str(libraries.build_fake_kernels()), "-o", str(library)], check=True)
    return str(library)


@pytest.mark.parametrize(
    ("functions", "told"),
    [
        ("".join(UNREGISTERED.format(kernel=f"npuzero_{op}") for op in OPS),
         "; ".join(f"{op} wrote nothing" for op in OPS)),
        (UNREGISTERED.format(kernel="npuzero_flat_adam"), "got flat_adam wrote nothing"),
        (WRONG_NORM, "got norm wrote other numbers"),
    ],
)  # fmt: skip
def test_kernels_that_do_not_run_are_refused_at_first_use(tmp_path, functions, told):
    """Their launches say success: training would go on without an update."""
    library = broken_kernels(tmp_path, functions)
    _C.use_npu_kernels(library)
    source, target = to_npu(torch.ones(3), torch.zeros(3))
    for _ in range(2):
        with pytest.raises(KernelUnavailable, match="npuzero build-npu") as raised:
            ops.cast(source, target)
        assert told in str(raised.value) and library in str(raised.value)
    _C.use_npu_kernels(str(libraries.build_fake_kernels()))
    ops.cast(source, target)
    assert target.cpu().eq(1).all()


def test_kernels_that_cann_did_not_register_are_refused(monkeypatch):
    """As the launch functions say it that CANN generates: by a line on stdout, and success."""
    monkeypatch.setenv("FAKE_CANN_UNREGISTERED", "1")
    _C.use_npu_kernels(str(libraries.build_fake_kernels()))
    source, target = to_npu(torch.ones(3), torch.zeros(3))
    with pytest.raises(KernelUnavailable, match="cast wrote nothing; pack wrote nothing; norm wrote nothing"):
        ops.cast(source, target)
    monkeypatch.delenv("FAKE_CANN_UNREGISTERED")
    _C.use_npu_kernels(str(libraries.build_fake_kernels()))
    ops.cast(source, target)
    assert target.cpu().eq(1).all()


def test_a_library_that_cannot_be_loaded_is_an_error(tmp_path):
    broken = tmp_path / "libnpuzero_kernels.so"
    broken.write_text("no library")
    _C.use_npu_kernels(os.fspath(broken))
    with pytest.raises(KernelUnavailable, match="npuzero build-npu"):
        ops.cast(*to_npu(torch.ones(3), torch.ones(3).bfloat16()))
    _C.use_npu_kernels("")
    with pytest.raises(KernelUnavailable, match="expected a kernel for npu; got none"):
        ops.cast(*to_npu(torch.ones(3), torch.ones(3).bfloat16()))
