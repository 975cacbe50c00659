"""The planner's pictures: what is drawn is what the planner says, and the title is the finding."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("matplotlib")

import matplotlib
from matplotlib.figure import Figure

from benchmarks.planning import pictures
from benchmarks.planning.published import PublishedTable
from npuzero.bench import Record, Result
from npuzero.cli.output.palette import STYLE
from npuzero.planner import Cluster

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(autouse=True)
def styled() -> Iterator[None]:
    with matplotlib.rc_context(STYLE):
        yield
    pictures.plt.close("all")


def planner_figure_title(figure: Figure) -> str:
    return str(figure.get_suptitle()).strip()


def test_efficiency_is_the_papers_curves() -> None:
    figure = pictures.draw_efficiency()
    # 0.9 / 0.1 * 70e12 over ait: s·b / 4 of two sequences of 1,024, and 24 h of a width of 2,048.
    assert f"{9 * 70 / (1024 * 2 / 4):.2f} TB/s" in planner_figure_title(
        figure
    ) and f"{9 * 70e3 / (24 * 2048):.0f} GB/s" in planner_figure_title(figure)
    for axes, intensity in zip(figure.axes, (1024, 256, 24 * 2048), strict=True):
        rates, values = axes.get_lines()[0].get_data()
        half = min(range(len(rates)), key=lambda i: abs(values[i] - 50))
        assert rates[half] == pytest.approx(70e3 / intensity, rel=0.05)  # half of the peak: ait · bandwidth = peak


def test_scaling_has_a_dot_for_each_published_row() -> None:
    figure = pictures.draw_scaling()
    table = PublishedTable.named("internevo")
    published = {row.published for row in table.judged}
    dots = [line for line in figure.axes[0].get_lines() if line.get_marker() == "o"]
    assert len(dots) == len(pictures.SERIES)
    for line in dots:
        ranks, values = line.get_data()
        assert list(ranks) == [8, 16, 32, 64, 128, 256, 512, 1024] and set(values) <= published
    assert re.search(r"cost \d+ % of the speed at 1,024 devices", planner_figure_title(figure))


def test_what_does_not_fit_is_said_and_has_no_speed() -> None:
    figure = pictures.draw_fits()
    texts = [text.get_text() for text in figure.axes[0].texts]
    assert len(texts) == len(pictures.FIT_ROWS) * len(pictures.FIT_SIZES)
    misfits = [text for text in texts if text.endswith("too much")]
    fitting = [re.fullmatch(r"([\d,]+)\n(\d+) GiB", text) for text in texts if text not in misfits]
    assert misfits and fitting and all(fitting)
    limit = Cluster.named(pictures.FIT_ON).device.memory_bytes / 2**30
    assert all(int(found[2]) <= limit + 0.5 for found in fitting if found)
    fastest = max(int(found[1].replace(",", "")) for found in fitting if found)
    assert f"{fastest:,} tokens/s" in planner_figure_title(figure)


def test_nobody_loses_more_than_a_late_rank_is_late_and_thin_wires_lose_least() -> None:
    found = pictures.disturbance_losses()
    assert set(found) == set(pictures.SKEW_PRESETS)
    late = [each[-1] for each in found.values()]
    assert all(0.5 * pictures.SKEW_LATE < part <= pictures.SKEW_LATE * 1.000001 for part in late)
    between = {name: each[0] for name, each in found.items()}
    assert min(between, key=lambda name: between[name]) == "thin"
    # What is kept whole is reduced whole: twice the bytes of a scatter go over the slow link.
    assert between["zero0"] > 1.5 * between["zero2"] > 0


def planned_steps_record(planned_s: float) -> Record:
    seconds = {"npuzero zero3": [0.9, 1.0, 1.2]}
    parts = {
        "products": 0.7 * planned_s,
        "recomputation": 0.0,
        "update": 0.2 * planned_s,
        "wait for gather": 0.1 * planned_s,
    }
    values = {"npuzero zero3": {"planned_s": planned_s, "parts_s": parts}}
    nothing: dict = dict.fromkeys(seconds)
    facts = {"layers": 8, "precision": "bf16", "batch": 1}
    result = Result("planned/bf16-batch1", "X", "npuzero zero3", "x", facts, "time", seconds, nothing, nothing, values)
    made = Record.begin("planned", "x", {"cpu": "c", "cores": 2, "isa": "i", "torch": "t", "commit": "abc"})
    made.results.append(result)
    return made


def test_a_step_is_stacked_of_what_it_spends_beside_what_was_measured() -> None:
    figure = pictures.draw_planned_steps(planned_steps_record(0.95))
    assert planner_figure_title(figure) == "A planned step is within 5 % of the measured one"
    *stacked, measured = figure.axes[0].patches
    assert sum(bar.get_height() for bar in stacked) == pytest.approx(950)
    assert measured.get_height() == pytest.approx(1000)
    legend = [text.get_text() for text in figure.legends[0].get_texts()]
    assert legend == ["matrix products", "update", "waiting", "measured, median and spread"]


def test_each_picture_has_its_command_in_the_makefile(tmp_path: Path) -> None:
    makefile = (ROOT / "Makefile").read_text("utf-8")
    drawn = re.search(r"for picture in ([\w ]+); do \$\(PY\) -m benchmarks.planning.pictures", makefile)
    assert drawn and set(drawn[1].split()) == set(pictures.PICTURES)
    for results, out in (("$(RESULTS)", "$(RESULTS)"), ("benchmarks/results", "docs")):
        assert f"planning.pictures step {results}/planned-cpu.json --out {out}/planner-step.png" in makefile
    for name in ("step", *pictures.PICTURES):
        assert (ROOT / "docs" / f"planner-{name}.png").is_file()
    with pytest.raises(SystemExit):
        pictures.main(["step", "--out", str(tmp_path / "x.png")])
    pictures.main(["efficiency", "--out", str(tmp_path / "x.png")])
    assert (tmp_path / "x.png").stat().st_size > 10_000
