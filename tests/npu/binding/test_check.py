"""The command that a real machine runs first, on the fake device with two processes: every part of its report."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from npu.fake import libraries


def run_npu_check(folder: Path, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """`npuzero check`; it and the processes that it starts are on the fake device."""
    paths = [str(libraries.HERE / "site"), str(libraries.ROOT / "tests"), os.environ.get("PYTHONPATH", "")]
    named = {"NPUZERO_NPU_KERNELS": str(libraries.build_fake_kernels()), "FAKE_HCCL_LOG": str(folder / "hccl.log")}
    environment = {**os.environ, **named, "PYTHONPATH": os.pathsep.join(paths), **variables}
    command = [sys.executable, "-m", "npuzero", "check", "--device", "npu", "--quick", "--out", str(folder), *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=500)


@pytest.mark.slow
def test_ops_collectives_and_bandwidths_are_in_the_report(tmp_path):
    done = run_npu_check(tmp_path, "--ranks", "2")
    assert done.returncode == 0, done.stderr
    report = json.loads((tmp_path / "report.json").read_text())
    for part, least in (("setup", 2), ("ops", 130), ("collectives", 25)):
        entries = report[part]
        assert len(entries) >= least and all(entry["cases"] > 0 for entry in entries)
        assert [entry for entry in entries if entry["wrong"]] == []
    names = " ".join(entry["name"] for entry in report["ops"])
    for op in ("cast stochastic", "pack f32 added to bf16", "norm bf16", "none masters and int8 moments", "in float64"):
        assert op in names
    assert [entry["cases"] for entry in report["training"]] == [10] * 5 and report["complete"]
    expected = {f"{verb}, 2 ranks" for verb in ("all_gather", "reduce_scatter", "all_reduce")}
    speeds = {entry["name"]: entry for entry in report["bandwidths"]}
    assert {*expected, "flat_adam, bf16 in and out", "host to device"} <= set(speeds)
    assert all(entry["gbs"] > 0 for entry in speeds.values()) and speeds["norm"]["of_nominal"] > 0
    assert report["device"]["soc"] == "Ascend910B1" and report["device"]["vector_cores"] == 48
    assert set(report["kernels"]["blocks"]) >= {
        "npuzero_cast",
        "npuzero_pack",
        "npuzero_norm",
        "npuzero_flat_adam",
        "npuzero_flat_lion",
        "npuzero_quantize",
        "npuzero_dequantize_sum",
    }
    assert report["machine"]["device"].startswith("Ascend910B1")
    calls = (tmp_path / "hccl.log").read_text()
    assert all(name in calls for name in ("AllGather", "ReduceScatter", "AllReduce", "Broadcast", "AlltoAll"))
    assert "zero3, device" in done.stdout and "of nominal" in done.stdout


@pytest.mark.slow
def test_without_kernels_the_report_says_so(tmp_path):
    done = run_npu_check(tmp_path, "--ranks", "1", NPUZERO_NPU_KERNELS="", XDG_CACHE_HOME=str(tmp_path))
    assert done.returncode == 2, done.stderr
    entries = json.loads((tmp_path / "report.json").read_text())["ops"]
    told = [entry["first"][0] for entry in entries if entry["wrong"]]
    assert told and all("npuzero build-npu" in problem for problem in told)
