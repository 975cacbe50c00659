"""`npuzero check`: right on this machine's CPU, and what is wrong is found and told."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from npuzero import _native
from npuzero.bench import check
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
    assert wrong == {"cast tf32", "cast away from zero", "cast stochastic"}


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
