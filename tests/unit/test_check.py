"""`npuzero check`: right on this machine's CPU, and what is wrong is found and told."""

from __future__ import annotations

import ctypes
import json
import math
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from npuzero import _C, _native
from npuzero import device as devices
from npuzero.bench.checks import check_ops as check
from npuzero.bench.checks import check_setup, check_training
from npuzero.bench.checks import op_cases as check_cases
from npuzero.cli import main
from npuzero.cli.check import PARTS
from npuzero.comm import SingleWorld
from npuzero.device import npu

CPU = torch.device("cpu")


def read_check_report(folder: Path) -> dict[str, Any]:
    report: dict[str, Any] = json.loads((folder / "report.json").read_text())
    return report


def wrong_entries(report: dict[str, Any]) -> dict[str, list[str]]:
    return {entry["name"]: entry["first"] for part in PARTS for entry in report[part] if entry["wrong"]}


@pytest.mark.world
def test_the_report_of_a_machine_that_is_right(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, value in (("HCCL_IF_IP", "1.2.3.4"), ("HCCL_BUFFSIZE", "200"), ("PASSWORD", "xyzzy")):
        monkeypatch.setenv(name, value)
    assert main(["check", "--quick", "--out", str(tmp_path)]) == 0, capsys.readouterr().err
    report = read_check_report(tmp_path)
    assert wrong_entries(report) == {} and report["complete"]
    assert {entry["name"].split()[0] for entry in report["ops"]} == set(_native.kernels())
    assert len(report["collectives"]) == 27 and len(report["setup"]) == 2
    assert [entry["cases"] for entry in report["training"]] == [2 * check_training.STEPS] * len(check_training.RUNS)
    assert len(report["losses"]) == 2 * len(check_training.RUNS)
    copy = {entry["name"]: entry for entry in report["bandwidths"]}[check.COPY]
    assert all(entry["gbs"] > 0 for entry in report["bandwidths"]) and copy["of_copy"] == 1
    assert report["variables"]["HCCL_IF_IP"] == "(set)" and report["variables"]["HCCL_BUFFSIZE"] == "200"
    said = capsys.readouterr().out
    assert report["machine"]["device"] in said and "zero3, cpu" in said
    assert list(tmp_path.iterdir()) == [tmp_path / "report.json"]  # one file to send
    everything = (tmp_path / "report.json").read_text() + said
    assert "xyzzy" not in everything and "1.2.3.4" not in everything and str(Path.home()) + "/" not in everything


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    """No ops, no training."""
    monkeypatch.setattr(check, "check_cases", lambda sizes: [])
    monkeypatch.setattr("npuzero.cli.check.check_training", lambda *_: [])


def test_a_device_that_is_not_there_is_a_finding(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with_npu = devices.KINDS["npu"].available().ok
    if with_npu:
        pytest.skip("there is one")
    assert main(["check", "--device", "npu", "--out", str(tmp_path)]) == 2
    report = read_check_report(tmp_path)
    assert "ConfigError" in wrong_entries(report)["device npu"][0] and report["installation"]["versions"]["torch"]
    said = capsys.readouterr().err
    assert devices.KINDS["npu"].available().reason in said
    assert devices.KINDS["npu"].available().do in said and "Please send" not in said  # there is nothing to look into


def test_what_cannot_be_measured_is_a_finding_and_the_rest_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, short: None
) -> None:
    def fails(*_: object) -> None:
        raise ArithmeticError("of whatever kind")

    monkeypatch.setattr(_native, "norm", fails)
    assert main(["check", "--quick", "--ranks", "1", "--out", str(tmp_path)]) == 2
    report = read_check_report(tmp_path)
    assert wrong_entries(report) == {
        f"bandwidth of {name}": ["ArithmeticError: of whatever kind"] for name in ("norm", "norm, bf16 added")
    }
    assert "flat_adam, 8-bit moments" in {entry["name"] for entry in report["bandwidths"]} and report["complete"]


def test_a_crash_leaves_what_was_found_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, short: None) -> None:
    def dies(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(check, "check_ops", dies)
    with pytest.raises(KeyboardInterrupt):
        main(["check", "--quick", "--ranks", "1", "--out", str(tmp_path)])
    report = read_check_report(tmp_path)
    assert [entry["name"] for entry in report["setup"]] == ["settings of the device", "first use of the kernels"]
    assert not report["complete"]


def test_kernels_that_do_nothing_are_found_at_first_use(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_native, "cast", lambda *_: None)
    _, first_use = check_setup.check_setup(CPU)
    assert first_use.wrong == 1 and "cast gave [0.0" in first_use.first[0]


@pytest.mark.parametrize("run", list(check_training.RUNS))
def test_training_without_updates_is_found(monkeypatch: pytest.MonkeyPatch, run: str) -> None:
    rank = check_training.TrainingCheckRank.__new__(check_training.TrainingCheckRank)
    rank.world = SingleWorld()
    assert not check_training.compare_training(run, [rank.train(run)]).wrong
    monkeypatch.setattr(_native, "flat_adam", lambda *_: None)
    assert check_training.compare_training(run, [rank.train(run)]).wrong == check_training.STEPS - 1


def test_ranks_that_cannot_train_are_a_finding_each(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(check_training, "python_worker", lambda module: [sys.executable, "-c", "1 / 0"])
    found = [finding for finding, _ in check_training.check_training("cpu", 2)]
    assert [finding.name for finding in found] == list(check_training.RUNS)
    assert all("ZeroDivisionError" in finding.first[0] for finding in found)


def test_versions_of_driver_and_firmware(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("INSTALLED", "USUAL"):
        monkeypatch.setattr(npu, name, tmp_path / name)
    assert npu.driver_versions() == {"driver": None, "firmware": None}
    for place, version in (("USUAL/driver", "24.1.0"), ("USUAL/firmware", "7.5"), ("moved/driver", "25.2.0")):
        (tmp_path / place).mkdir(parents=True)
        (tmp_path / place / "version.info").write_text(f"package_version=0\nVersion={version}\nascendhal_version=1\n")
    assert npu.driver_versions() == {"driver": "24.1.0", "firmware": "7.5"}
    (tmp_path / "INSTALLED").write_text(f"UserName=x\nDriver_Install_Path_Param={tmp_path}/moved\n")
    assert npu.driver_versions() == {"driver": "25.2.0", "firmware": "7.5"}


@pytest.mark.slow
@pytest.mark.world
def test_a_wrong_result_is_told_and_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    right = _native.cast
    monkeypatch.setattr(_native, "cast", lambda source, target, rounding, *rest: right(source, target, 0, *rest))
    assert main(["check", "--quick", "--ranks", "1", "--out", str(tmp_path)]) == 2
    assert "send" in capsys.readouterr().err
    wrong = set(wrong_entries(read_check_report(tmp_path)))
    assert {"cast tf32", "cast away from zero", "cast stochastic"} <= wrong
    assert all(name.startswith(("cast tf32", "cast away from zero", "cast stochastic")) for name in wrong)


Op = Callable[..., None]


def read_float_view(view: _C.View) -> float:
    return ctypes.c_float.from_address(view.data).value


def without_skip(op: Op, line: Any, ranges: Any, groups: Any, scale: Any, skip: Any, *rest: Any) -> None:
    op(line, ranges, groups, scale, None, *rest)


def with_nan_for_no(op: Op, line: Any, ranges: Any, groups: Any, scale: Any, skip: Any, *rest: Any) -> None:
    op(line, ranges, groups, scale, None if skip and math.isnan(read_float_view(skip)) else skip, *rest)


def with_any_skip(op: Op, line: Any, ranges: Any, groups: Any, scale: Any, skip: Any, *rest: Any) -> None:
    if not skip:
        op(line, ranges, groups, scale, skip, *rest)


def with_offsets_of(bits: int, op: Op, source: Any, target: Any, *rest: Any) -> None:
    rounding, seed, offset, *at = rest
    before = min(source.count, -offset % 2**bits)
    for begin, count in ((0, before), (before, source.count - before)):
        views = (_C.View(v.data + 4 // (1 + v.dtype) * begin, count, v.dtype, 0) for v in (source, target))
        op(*views, rounding, seed, (offset + begin) % 2**bits, *at)


def with_places_of(bits: int, op: Op, line: Any, ranges: Any, *rest: Any) -> None:
    op(line, [(*fields, place % 2**bits) for *fields, place in ranges], *rest)


def with_the_first_row(op: Op, line: Any, ranges: Any, groups: Any, *rest: Any) -> None:
    op(line, ranges, [(*fields, min(row, 0)) for *fields, row in groups], *rest)


def with_the_first_tensor(op: Op, line: Any, ranges: Any, *rest: Any) -> None:
    op(line, [fields for fields in ranges if fields[1] <= line[0][7]], *rest)


def with_the_betas_swapped(op: Op, line: Any, ranges: Any, groups: Any, *rest: Any) -> None:
    op(line, ranges, [(*fields[2:4], *fields[:2], *fields[4:]) for fields in groups], *rest)


def without_maximize(op: Op, line: Any, ranges: Any, groups: Any, *rest: Any) -> None:
    op(line, ranges, [group._replace(maximize=False) for group in groups], *rest)


def with_half_away(op: Op, source: Any, target: Any, rounding: int, *rest: Any) -> None:
    op(source, target, 3 if (source.dtype, target.dtype, rounding) == (0, 1, 0) else rounding, *rest)


def without_a_look_for_nan(op: Op, source: Any, target: Any, rounding: int, *rest: Any) -> None:
    op(source, target, rounding, *rest)
    if (source.dtype, target.dtype, rounding) == (0, 1, 0):  # f32's bits, rounded as those of any number
        for i in range(source.count):
            bits = ctypes.c_uint32.from_address(source.data + 4 * i).value
            upper = ctypes.c_uint16.from_address(target.data + 2 * i)
            upper.value = bits + 0x7FFF + (bits >> 16 & 1) >> 16


def with_nan_for_infinity(op: Op, x: Any, out: Any, *rest: Any) -> None:
    op(x, out, *rest)
    total = ctypes.c_double.from_address(out.data)
    total.value = math.nan if total.value == math.inf else total.value


def without_residual(op: Op, source: Any, message: Any, residual: Any, *rest: Any) -> None:
    op(source, message, None, *rest)


def with_half_up(op: Op, source: Any, message: Any, *rest: Any) -> None:
    op(source, message, *rest)
    if (source.dtype, source.count, rest[2]) == (0, 256 * rest[1], 8):
        for i in range(source.count):
            x = ctypes.c_float.from_address(source.data + 4 * i).value
            at = i // 256 * 512 + i % 256
            if x % 4 == 2:
                ctypes.c_int8.from_address(message.data + at).value = math.floor(x / 4 + 0.5)


def without_accumulation(op: Op, *arguments: Any) -> None:
    op(*arguments[:5], False, arguments[6])


def with_one_row(op: Op, messages: Any, out: Any, rows: int, *rest: Any) -> None:
    op(_C.View(messages.data, messages.count // rows, messages.dtype, 0), out, 1, *rest)


slow = partial(pytest.param, marks=pytest.mark.slow)


@pytest.mark.parametrize(
    ("op", "mutant", "among", "told"),
    [
        ("flat_adam", without_skip, ": skip", {"skip = 1", "skip = nan"}),
        ("flat_adam", with_nan_for_no, ": skip", {"skip = nan"}),
        ("flat_adam", with_any_skip, ": skip", {"skip = 0"}),
        ("cast", partial(with_offsets_of, 31), ": draws", {"across 2^31", "across 2^32", "across 2^45", "up to 2^62"}),
        slow("cast", partial(with_offsets_of, 32), ": draws", {"across 2^32", "across 2^45", "up to 2^62"}),
        ("cast", partial(with_offsets_of, 45), ": draws", {"across 2^45", "up to 2^62"}),
        slow("flat_adam", partial(with_places_of, 32), ": draws", {"across 2^32", "across 2^45", "up to 2^62"}),
        ("flat_adam", partial(with_places_of, 45), ": draws", {"across 2^45", "up to 2^62"}),
        ("flat_adam", with_the_first_row, ": coefficients", {"coefficients on the device"}),
        ("flat_lion", without_skip, "flat_lion", {"skip = 1", "skip = nan"}),
        slow("flat_lion", partial(with_places_of, 45), "flat_lion", {"across 2^45", "up to 2^62"}),
        slow("flat_lion", with_the_first_row, "flat_lion", {"coefficients on the device"}),
        (
            "flat_lion",
            with_the_betas_swapped,
            "flat_lion f32",
            {"flat_lion f32 to bf16", "flat_lion f32 to f16", "flat_lion f32 to nothing"},
        ),
        slow("flat_lion", without_maximize, "flat_lion", {"flat_lion maximize"}),
        slow("flat_adam", with_the_first_tensor, "flat_adam ", {"flat_adam of many tensors by one launch"}),
        ("cast", with_half_away, "cast f32 to bf16:", {"ties"}),
        ("quantize", without_residual, "quantize f16 to int8", {"quantize f16 to int8, fed back"}),
        ("quantize", with_half_up, "quantize f32 to int8:", {"ties"}),
        (
            "dequantize_sum",
            without_accumulation,
            "dequantize_sum",
            {f"dequantize_sum int{bits} added to {kind}" for bits in (8, 4) for kind in ("f32", "bf16", "f16")},
        ),
        (
            "dequantize_sum",
            with_one_row,
            "dequantize_sum int4 ",
            {f"dequantize_sum int4 {to} {kind}" for to in ("to", "added to") for kind in ("f32", "bf16", "f16")}
            | {"NaNs", "infinities"},
        ),
        ("cast", without_a_look_for_nan, "cast f32 to bf16:", {"NaNs"}),
        ("norm", with_nan_for_infinity, "norm bf16:", {"infinities", "two infinities"}),
    ],
)
def test_a_probe_names_what_is_wrong(
    monkeypatch: pytest.MonkeyPatch, op: str, mutant: Callable[..., None], among: str, told: set[str]
) -> None:
    some = [case for case in check_cases.check_cases((0, 5, 4099)) if among in case[0]]
    monkeypatch.setattr(check, "check_cases", lambda sizes: some)
    assert not any(finding.wrong for finding in check.check_ops(CPU))
    monkeypatch.setattr(_native, op, partial(mutant, getattr(_native, op)))
    wrong = {finding.name.split(": ")[-1].removeprefix("draws ") for finding in check.check_ops(CPU) if finding.wrong}
    assert wrong == told


def test_a_write_beside_the_output_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def beyond(source: _C.View, target: _C.View, *rest: int) -> None:
        longer = [_C.View(view.data, view.count + bool(view.count), view.dtype, 0) for view in (source, target)]
        right(*longer, *rest)

    right = _native.cast
    monkeypatch.setattr(_native, "cast", beyond)
    finding = next(check.check_ops(CPU, quick=True))
    assert finding.wrong == finding.cases - len(check.OFFSETS) and "outside the buffers" in finding.first[0]


def test_what_raises_is_a_finding(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_native, "current_stream_handle", lambda device: 1 / 0)
    with pytest.raises(ZeroDivisionError):  # a fault of ours is not the device's
        next(check.check_ops(CPU, quick=True))

    def refuses(*_: object) -> None:
        raise RuntimeError("the device says no")

    monkeypatch.setattr(_native, "current_stream_handle", lambda device: 0)
    monkeypatch.setattr(_native, "cast", refuses)
    finding = next(check.check_ops(CPU, quick=True))
    assert finding.wrong == finding.cases and "the device says no" in finding.first[0]
