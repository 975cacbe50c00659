"""`npuzero check`: right on this machine's CPU, and what is wrong is found and told."""

from __future__ import annotations

import ctypes
import json
import math
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from npuzero import _native
from npuzero.bench import check, check_cases
from npuzero.cli import main

CPU = torch.device("cpu")


@pytest.mark.world
def test_the_report_of_a_machine_that_is_right(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", "--quick", "--out", str(tmp_path)]) == 0, capsys.readouterr().err
    report = json.loads((tmp_path / "report.json").read_text())
    assert not any(entry["wrong"] for part in ("ops", "collectives") for entry in report[part])
    assert {entry["name"].split()[0] for entry in report["ops"]} == {"cast", "pack", "norm", "flat_adam"}
    assert len(report["collectives"]) == 27 and all(speed > 0 for speed in report["bandwidths"].values())
    assert report["machine"]["device"] in (tmp_path / "report.txt").read_text()


def test_a_wrong_result_is_told_and_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    right = _native.cast
    monkeypatch.setattr(_native, "cast", lambda source, target, rounding, *rest: right(source, target, 0, *rest))
    assert main(["check", "--quick", "--ranks", "0", "--out", str(tmp_path)]) == 2
    assert "send" in capsys.readouterr().err
    wrong = {entry["name"] for entry in json.loads((tmp_path / "report.json").read_text())["ops"] if entry["wrong"]}
    assert {"cast tf32", "cast away from zero", "cast stochastic"} <= wrong
    assert all(name.startswith(("cast tf32", "cast away from zero", "cast stochastic")) for name in wrong)


Op = Callable[..., None]


def value_of(view: _native._C.View) -> float:
    return ctypes.c_float.from_address(view.data).value


def without_skip(op: Op, line: Any, ranges: Any, groups: Any, scale: Any, skip: Any, *rest: Any) -> None:
    op(line, ranges, groups, scale, None, *rest)


def with_nan_for_no(op: Op, line: Any, ranges: Any, groups: Any, scale: Any, skip: Any, *rest: Any) -> None:
    op(line, ranges, groups, scale, None if skip and math.isnan(value_of(skip)) else skip, *rest)


def with_any_skip(op: Op, line: Any, ranges: Any, groups: Any, scale: Any, skip: Any, *rest: Any) -> None:
    if not skip:
        op(line, ranges, groups, scale, skip, *rest)


def with_offsets_of(bits: int, op: Op, source: Any, target: Any, *rest: Any) -> None:
    rounding, seed, offset, *at = rest
    before = min(source.count, -offset % 2**bits)
    for begin, count in ((0, before), (before, source.count - before)):
        views = (_native._C.View(v.data + 4 // (1 + v.dtype) * begin, count, v.dtype, 0) for v in (source, target))
        op(*views, rounding, seed, (offset + begin) % 2**bits, *at)


def with_places_of(bits: int, op: Op, line: Any, ranges: Any, *rest: Any) -> None:
    op(line, [(*fields, place % 2**bits) for *fields, place in ranges], *rest)


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


@pytest.mark.parametrize(
    ("op", "mutant", "among", "told"),
    [
        ("flat_adam", without_skip, ": skip", {"skip = 1", "skip = nan"}),
        ("flat_adam", with_nan_for_no, ": skip", {"skip = nan"}),
        ("flat_adam", with_any_skip, ": skip", {"skip = 0"}),
        ("cast", partial(with_offsets_of, 31), ": draws", {"across 2^31", "across 2^32", "across 2^45", "up to 2^62"}),
        ("cast", partial(with_offsets_of, 32), ": draws", {"across 2^32", "across 2^45", "up to 2^62"}),
        ("cast", partial(with_offsets_of, 45), ": draws", {"across 2^45", "up to 2^62"}),
        ("flat_adam", partial(with_places_of, 32), ": draws", {"across 2^32", "across 2^45", "up to 2^62"}),
        ("flat_adam", partial(with_places_of, 45), ": draws", {"across 2^45", "up to 2^62"}),
        ("cast", with_half_away, "cast f32 to bf16:", {"ties"}),
        ("cast", without_a_look_for_nan, "cast f32 to bf16:", {"NaNs"}),
        ("norm", with_nan_for_infinity, "norm bf16:", {"infinities", "two infinities"}),
    ],
)
def test_a_probe_names_what_is_wrong(
    monkeypatch: pytest.MonkeyPatch, op: str, mutant: Callable[..., None], among: str, told: set[str]
) -> None:
    some = [case for case in check_cases.cases((0, 5, 4099)) if among in case[0]]
    monkeypatch.setattr(check, "cases", lambda sizes: some)
    assert not any(finding.wrong for finding in check.check_ops(CPU))
    monkeypatch.setattr(_native, op, partial(mutant, getattr(_native, op)))
    wrong = {finding.name.split(": ")[1].removeprefix("draws ") for finding in check.check_ops(CPU) if finding.wrong}
    assert wrong == told


def test_a_write_beside_the_output_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def beyond(source: _native._C.View, target: _native._C.View, *rest: int) -> None:
        longer = [_native._C.View(view.data, view.count + bool(view.count), view.dtype, 0) for view in (source, target)]
        right(*longer, *rest)

    right = _native.cast
    monkeypatch.setattr(_native, "cast", beyond)
    finding = next(check.check_ops(CPU, quick=True))
    assert finding.wrong == finding.cases - len(check.OFFSETS) and "outside the buffers" in finding.first[0]


def test_what_raises_is_a_finding(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_native, "stream", lambda device: 1 / 0)
    with pytest.raises(ZeroDivisionError):  # a fault of ours is not the device's
        next(check.check_ops(CPU, quick=True))

    def refuses(*_: object) -> None:
        raise RuntimeError("the device says no")

    monkeypatch.setattr(_native, "stream", lambda device: 0)
    monkeypatch.setattr(_native, "cast", refuses)
    finding = next(check.check_ops(CPU, quick=True))
    assert finding.wrong == finding.cases and "the device says no" in finding.first[0]
