"""What docs/ascend.md says of attention, and its program on the emulated device."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from examples import pages
from examples.test_ascend import PROGRAM, losses
from npu.binding.ranks import run
from npu.fake import libraries


@pytest.mark.slow
def test_sdpa_is_the_fused_attention(tmp_path: Path):
    (fused,) = run("page_cases:attention", 1, tmp_path)
    assert fused == ["bfloat16", "float16", "float32", "grouped heads", "boolean mask"]


@pytest.mark.slow
def test_the_program_trains_as_on_the_cpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    on_cpu = losses(pages.run(PROGRAM, 2, tmp_path))
    for folder in ("runs", "weights"):
        shutil.rmtree(tmp_path / folder)
    monkeypatch.chdir(tmp_path)
    answers = run("page_cases:program", 2, tmp_path, NPUZERO_NPU_KERNELS=str(libraries.kernels()))
    assert answers == [[[True, True]]] * 2, "causal and without a mask, which is the fused way"
    on_npu = losses((tmp_path / "0.txt").read_text())
    assert on_npu.keys() == on_cpu.keys()
    assert all(abs(on_npu[step] - on_cpu[step]) < 0.01 for step in on_cpu)
    assert (tmp_path / "weights/model.safetensors").is_file()
