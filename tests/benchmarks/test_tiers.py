"""The picture of training with states on a disk, its rows in the tables, and the records of memory and steps."""

from __future__ import annotations

import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import matplotlib
import pytest

from benchmarks import farstep, figures, highwater, plot, tiers
from npuzero.bench import Record, Result
from npuzero.cli.output.palette import GOAL, OTHER, OWN, STYLE


def tiers_result(name: str, seconds: dict[str, list[float]], **values: Any) -> Result:
    return Result(
        name,
        name,
        next(iter(seconds)),
        "",
        {"precision": "bf16"},
        "",
        seconds,
        dict.fromkeys(seconds, 1),
        dict.fromkeys(seconds),
        dict.fromkeys(seconds, values),
    )


def tiers_measurements() -> dict[str, Result]:
    steps = {"compute only": 3.0, "npuzero": 4.25, "npuzero-split": 4.0, "npuzero-8bit": 3.4, "deepspeed": 5.5}
    steps |= {"mapped": 7.0, "mapped-dropped": 6.5}
    updates = {"npuzero-blocking": 1.2, "npuzero-split-blocking": 1.0, "npuzero-8bit-blocking": 0.5, "deepspeed": 1.5}
    updates |= {"mapped": 3.0, "mapped-dropped": 3.5}
    held = {"held_bytes": [8e8] * 5, "peak_bytes": 9e8, "cap_bytes": 1e9, "states_bytes": 2e9, "base_bytes": 2e8}
    found = [
        tiers_result("nvme/step-bf16-1", {who: [value] * 5 for who, value in steps.items()}),
        tiers_result("nvme/update-bf16-1", {who: [value] * 5 for who, value in updates.items()}),
        tiers_result("highwater", {"npuzero": [1.0] * 5}, **held, plan_bytes=7e8, beyond_plan=0.0),
        tiers_result("farstep/whole", {"resident": [1.0], "npuzero": [1.5], "npuzero, early": [1.04]}),
    ]
    return {each.name: each for each in found}


def test_the_picture_has_a_bar_for_each_and_the_cap() -> None:
    results = tiers_measurements()
    with matplotlib.rc_context(STYLE):
        figure = tiers.draw_tiers(results)
    bars, curve = figure.axes
    colours = [matplotlib.colors.to_hex(bar.get_facecolor()).upper() for bar in bars.patches]
    assert colours == [*[OWN.upper()] * 3, *[OTHER.upper()] * 3]
    assert [bar.get_width() for bar in bars.patches] == pytest.approx([0.4, 1.0, 1.25, 2.5, 4.0, 3.5])
    assert [line.get_xdata()[0] for line in bars.lines if line.get_color() == GOAL] == [2.0, 3.0, 3.0]
    (cap,) = [line for line in curve.lines if line.get_color() == GOAL]
    assert cap.get_ydata()[0] == 1000 and list(curve.lines[0].get_ydata()) == [800] * 5
    assert figure.get_suptitle().strip() == "States on a disk cost others 2.5 to 4.0 times as much"


@pytest.mark.parametrize("names", [["nvme/step-bf16-1"], ["highwater"]])
def test_each_record_has_a_picture_alone(names: list[str], tmp_path: Path) -> None:
    machine = {"cpu": "a processor", "cores": 2, "isa": "avx2", "torch": "2", "commit": "abc"}
    results = [tiers_measurements()[name] for name in names]
    Record("nvme", "", machine, "2026-01-01", False, results).write(tmp_path / "record.json")
    plot.main([str(tmp_path / "record.json"), "--out", str(tmp_path / "nvme.png")])
    assert (tmp_path / "nvme.png").read_bytes().startswith(b"\x89PNG")


def test_the_tables_hold_the_quickest_of_others_against_npuzero() -> None:
    rows = figures.figure_groups(tiers_measurements())
    assert [(name, shown) for name, _, shown, _ in rows["disk"]] == [
        ("what float32 states add to a step", "2.50 ✓"),
        ("an update alone of float32 states", "1.50 ✗"),
        ("what bf16-8bit states add to a step", "6.25 ✓"),
        ("an update alone of bf16-8bit states", "3.00 ✗"),
        ("what float32 states add to a step", "3.50 ✓"),
        ("an update alone of float32 states", "3.00 ✓"),
    ]
    assert [shown for _, _, shown, _ in rows["far"]] == ["1.50 ✗", "1.04 ✓", "0.00 ✓"]


def test_a_page_has_the_picture_where_its_records_are() -> None:
    assert f"]({figures.DISK_PICTURE.name})" in figures.markdown([], tiers_measurements())
    assert figures.DISK_PICTURE.name not in figures.markdown([], {})


def test_growth_is_of_the_steps_in_which_malloc_keeps_nothing() -> None:
    kept = [900.0 * (step % 7) * (step % 10 < 9) for step in range(60)]
    assert highwater.growth_per_step(kept) == 0
    assert highwater.growth_per_step([7 * step + more for step, more in enumerate(kept)]) == pytest.approx(7)
    assert highwater.growth_per_step([7.0 * step for step in range(50)]) == pytest.approx(7)
    assert highwater.growth_per_step([100.0 - 900 * (step == 39) for step in range(200)]) == 0


def test_a_step_hides_behind_its_forward_or_behind_all_of_it() -> None:
    parts = farstep.StepParts(forward_s=1.0, backward_s=2.0, update_s=9.0)
    assert {name: way(parts) for name, way in farstep.HIDING.items()} == {"forward": 1.0, "whole": 3.0}
    assert {f"farstep/{name}" for name in farstep.HIDING} == {
        name for figure in figures.FIGURES for name in figure.benchmarks if name.startswith("farstep")
    }


def run_benchmark_script(module: str, options: str, folder: Path) -> Record:
    """What a script leaves."""
    out = folder / "record.json"
    where = ["--folder", str(folder), "--out", str(out)]
    subprocess.run(
        [sys.executable, "-m", f"benchmarks.{module}", *shlex.split(options), *where], check=True, timeout=500
    )
    return Record.read(out)


@pytest.mark.slow
def test_steps_beside_the_disk_are_measured(tmp_path: Path) -> None:
    record = run_benchmark_script("farstep", "--dim 64 --layers 2 --heads 2 --sequence 8 --rounds 2", tmp_path)
    assert [found.name for found in record.results] == ["farstep/whole", "farstep/forward"]
    for found in record.results:
        assert set(found.seconds) == set(farstep.CONTENDERS)
        assert found.parameters["disk_bytes"] > 2 * 8 * 64 * 64 * 24


@pytest.mark.slow
def test_memory_stays_within_the_plan_and_does_not_grow(tmp_path: Path) -> None:
    """States four times as large as the memory for them; the script itself fails where a goal is not met.

    Of a sequence so short that activations leave what is allowed beyond the plan to what malloc keeps.
    """
    record = run_benchmark_script("highwater", "--layers 48 --sequence 2 --steps 200", tmp_path)
    found = record.result("highwater").values["npuzero"]
    assert len(found["held_bytes"]) == 200 and found["states_bytes"] >= 4 * found["states_room_bytes"]
    assert found["peak_bytes"] <= found["cap_bytes"]
