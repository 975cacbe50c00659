"""Loss curves by precision: the arithmetic of the comparison, the committed record, and (slow) every curve anew."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path

import pytest
import torch

from benchmarks.precision import __main__ as command
from benchmarks.precision import curves, thin
from benchmarks.precision.curves import (
    BASELINE,
    CONTENDERS,
    Options,
    PrecisionContender,
    TrainingCurve,
    largest_distance,
    load_corpus,
    smooth_losses,
    train_curve,
)
from npuzero.plan import PRECISIONS, parse_precision

RECORD = Path(__file__).resolve().parents[2] / "benchmarks" / "results" / "precision" / "curves.json"


def test_means_and_distances():
    assert smooth_losses([1.0] * 20 + [21.0]) == [1.0, 2.0]
    base = [2.0] * 100
    apart = [9.0] * curves.AFTER + [2.0] * 20 + [2.0 + 0.5] * 20  # before AFTER nothing counts
    assert largest_distance(base, base) == 0.0 and largest_distance(apart, base) == 0.5


def test_every_named_precision_a_cpu_has_is_run():
    run = {parse_precision(contender.precision) for contender in CONTENDERS.values()}
    assert {precision for precision in PRECISIONS.values() if precision.matmul == "ieee"} <= run


def test_the_committed_curves_are_complete_and_within_their_bands(capsys):
    found = json.loads(RECORD.read_text("utf-8"))
    assert list(found["curves"]) == list(CONTENDERS)
    assert found["curves"]["bf16-split"] == found["curves"]["bf16"]
    assert found["options"]["steps"] == curves.STEPS == 300
    assert command.judge_curves(found["curves"]) == []
    assert "bf16-stochastic" in capsys.readouterr().out


def test_a_curve_outside_its_band_is_said(capsys):
    flat, high = TrainingCurve([2.0] * 100, 0), TrainingCurve([2.5] * 100, 0)
    assert command.judge_curves({BASELINE: vars(flat), "bf16": vars(high), "fp16": vars(flat)}) == ["bf16"]
    assert "bf16: 0.5000 nats" in capsys.readouterr().out


def test_a_record_keeps_the_curves_of_the_same_options(tmp_path):
    path, options = tmp_path / "curves.json", {"steps": 2}
    record = command.load_curves(path, options)
    record["curves"]["bf16"] = {"losses": [1.0, 0.123456789], "skipped": 0}
    command.write_curves(path, record)
    assert command.load_curves(path, options)["curves"]["bf16"]["losses"] == [1.0, 0.12346]
    assert command.load_curves(path, {"steps": 3})["curves"] == {}


def test_a_picture_names_equal_curves_together_and_has_no_colour_twice(tmp_path):
    pytest.importorskip("matplotlib")
    from benchmarks.precision.plot import draw_curves, plot_curves

    record = json.loads(RECORD.read_text("utf-8"))
    figure = draw_curves(record)
    lines = {line.get_label(): line.get_color() for axes in figure.axes for line in axes.get_lines()}
    named = {label: colour for label, colour in lines.items() if not label.startswith("_")}
    assert "bf16 = bf16-split" in named and "bf16" not in named
    assert len(set(named.values())) == len(named) == len(CONTENDERS) - 1
    assert figure.get_suptitle().startswith("Every precision stays within 0.023 nats per byte of fp32")
    ramp = [3.0 - i / 100 for i in range(120)]
    plot_curves({"curves": {BASELINE: {"losses": ramp}, "bf16": {"losses": ramp}}}, tmp_path / "curves.png")
    assert (tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG")


def test_a_precision_outside_its_band_is_what_the_picture_says():
    pytest.importorskip("matplotlib")
    from benchmarks.precision.plot import summarize_curves

    assert summarize_curves({"bf16": [2.5] * 100}, [2.0] * 100, 0.03).startswith("A precision strays 0.500")


@pytest.mark.parametrize("name", [BASELINE, "fp16", "bf16-8bit"])
def test_a_curve_is_run(name):
    tiny = Options(steps=3, batch=1, seq=16, dim=32, layers=1, heads=1)
    found = train_curve(CONTENDERS[name], torch.arange(5000, dtype=torch.uint8), tiny)
    assert len(found.losses) == 3 and all(loss > 0 for loss in found.losses)
    assert found.skipped == 0


@cache
def full_loss_curve(name: str) -> TrainingCurve:
    return train_curve(CONTENDERS[name], load_corpus(), Options(steps=curves.STEPS))


@pytest.mark.slow
@pytest.mark.parametrize("name", CONTENDERS)
def test_three_hundred_steps_stay_within_the_band(name):
    contender: PrecisionContender = CONTENDERS[name]
    assert largest_distance(full_loss_curve(name).losses, full_loss_curve(BASELINE).losses) <= contender.band


@pytest.mark.slow
def test_split_masters_give_the_same_curve_to_the_bit():
    assert full_loss_curve("bf16-split") == full_loss_curve("bf16")


def test_thin_wires_are_within_their_bands_by_seed_and_the_page_says_how_close():
    found = json.loads(RECORD.with_name("thin.json").read_text("utf-8"))["curves"]
    assert list(found) == [f"{name}, seed {seed}" for seed in thin.SEEDS for name in thin.CONTENDERS]
    assert all(len(each["losses"]) == thin.STEPS == 300 for each in found.values())
    assert thin.find_outside(found) == []
    page = (RECORD.parents[3] / "docs" / "numerics.md").read_text("utf-8")
    assert f"{thin.BEGIN}\n{thin.thin_table(found)}\n{thin.END}" in page


def test_a_thin_curve_outside_its_band_is_said():
    runs = {f"{name}, seed {seed}": {"losses": [2.0] * 100} for seed in thin.SEEDS for name in thin.CONTENDERS}
    runs["thin, seed 1"] = {"losses": [2.0] * 70 + [2.03] * 30}
    runs["thin, feedback, seed 2"] = {"losses": [3.0] * 100}  # told, not judged
    assert thin.find_outside(runs) == ["thin"]
    assert "| thin | 0.0000 | 0.0300 | 0.0000 | 0.02 ✗ |" in thin.thin_table(runs)
