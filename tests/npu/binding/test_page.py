"""What docs/ascend.md says of attention, and its program on the emulated device."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from examples import pages
from examples.test_ascend import PROGRAM, parse_ascend_losses
from npu.binding.ranks import run_npu_ranks
from npu.fake import libraries


@pytest.mark.slow
def test_sdpa_is_the_fused_attention(tmp_path: Path):
    (fused,) = run_npu_ranks("page_cases:find_fused_attention", 1, tmp_path)
    assert fused == ["bfloat16", "float16", "float32", "grouped heads", "boolean mask"]


@pytest.mark.slow
def test_the_program_trains_as_on_the_cpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    on_cpu = parse_ascend_losses(pages.run_program_text(PROGRAM, 2, tmp_path))
    for folder in ("runs", "weights"):
        shutil.rmtree(tmp_path / folder)
    monkeypatch.chdir(tmp_path)
    answers = run_npu_ranks(
        "page_cases:run_ascend_program", 2, tmp_path, NPUZERO_NPU_KERNELS=str(libraries.build_fake_kernels())
    )
    assert answers == [[[True, True]]] * 2, "causal and without a mask, which is the fused way"
    on_npu = parse_ascend_losses((tmp_path / "0.txt").read_text())
    assert on_npu.keys() == on_cpu.keys()
    assert all(abs(on_npu[step] - on_cpu[step]) < 0.01 for step in on_cpu)
    assert (tmp_path / "weights/model.safetensors").is_file()
