"""The palette is told apart by everybody, and by printers; ``npuzero plan --plot`` says what it shows."""

from __future__ import annotations

import ast
import re
from itertools import combinations
from pathlib import Path

import pytest

from npuzero.cli.output import palette
from npuzero.cli.output.plot import draw_reports, summarize_reports
from npuzero.config import Settings
from npuzero.plan import Plan, Report
from npuzero.planner.models import from_size

ROOT = Path(__file__).resolve().parents[2]
COLOUR = re.compile(r"#[0-9a-fA-F]{3}(?:[0-9a-fA-F]{3}(?:[0-9a-fA-F]{2})?)?|C\d|tab:\w+")

# Machado, Oliveira, Fernandes 2009: what is seen without one kind of cones, in linear RGB.
VISIONS = {
    "usual": ((1, 0, 0), (0, 1, 0), (0, 0, 1)),
    "protanopia": ((0.152286, 1.052583, -0.204868), (0.114503, 0.786281, 0.099216), (-0.003882, -0.048116, 1.051998)),
    "deuteranopia": ((0.367322, 0.860646, -0.227968), (0.280085, 0.672501, 0.047413), (-0.01182, 0.04294, 0.968881)),
    "tritanopia": ((1.255528, -0.076749, -0.178779), (-0.078411, 0.930809, 0.147602), (0.004733, 0.691367, 0.3039)),
}


def cielab_colour(colour: str, vision: str = "usual") -> tuple[float, float, float]:
    """CIELAB of what is seen; its first is lightness, which is what a printer in grey leaves."""
    coded = [int(colour[place : place + 2], 16) / 255 for place in (1, 3, 5)]
    rgb = [value / 12.92 if value <= 0.04045 else ((value + 0.055) / 1.055) ** 2.4 for value in coded]
    red, green, blue = (sum(a * b for a, b in zip(row, rgb, strict=True)) for row in VISIONS[vision])
    xyz = (
        (0.4124 * red + 0.3576 * green + 0.1805 * blue) / 0.95047,
        0.2126 * red + 0.7152 * green + 0.0722 * blue,
        (0.0193 * red + 0.1192 * green + 0.9505 * blue) / 1.08883,
    )
    x, y, z = (value ** (1 / 3) if value > 0.008856 else 7.787 * value + 16 / 116 for value in xyz)
    return 116 * y - 16, 500 * (x - y), 200 * (y - z)


@pytest.mark.parametrize("group", ["PARTS", "FARTHER", "WORK", "SENT"])
def test_colours_that_meet_differ_in_grey_and_to_every_eye(group):
    for (name, one), (other_name, other) in combinations(getattr(palette, group).items(), 2):
        assert abs(cielab_colour(one)[0] - cielab_colour(other)[0]) >= 10, (name, other_name)
        for vision in VISIONS:
            apart = (
                sum((a - b) ** 2 for a, b in zip(cielab_colour(one, vision), cielab_colour(other, vision), strict=True))
                ** 0.5
            )
            assert apart >= 20, (name, other_name, vision)


def test_curves_differ_in_colour_and_in_grey_in_lightness_or_dashes():
    for (one, dash), (other, other_dash) in combinations(palette.CURVES, 2):
        assert one != other
        assert abs(cielab_colour(one)[0] - cielab_colour(other)[0]) >= 10 or dash != other_dash, (one, other)


def test_text_on_a_colour_is_dark_or_white():
    assert palette.text_colour(palette.PARTS["activations"]) == palette.TEXT
    assert palette.text_colour(palette.PARTS["parameters"]) == palette.PAPER


def named_colours(path: Path) -> list[str]:
    """Where a source says a colour: hexadecimal or matplotlib's short ones anywhere, by name as a ``color=``."""
    names = pytest.importorskip("matplotlib.colors").get_named_colors_mapping()
    found = []
    for node in ast.walk(ast.parse(path.read_text("utf-8"), str(path))):
        if isinstance(node, ast.keyword) and re.search("colou?r", node.arg or ""):
            texts = [part for part in ast.walk(node.value) if isinstance(part, ast.Constant) and part.value in names]
        else:
            texts = [node] if isinstance(node, ast.Constant) and COLOUR.fullmatch(str(node.value)) else []
        found += [f"{path.relative_to(ROOT)}:{text.lineno}" for text in texts]
    return found


def test_only_the_palette_names_colours():
    sources = [path for folder in ("npuzero", "benchmarks", "examples") for path in (ROOT / folder).rglob("*.py")]
    palette_itself = Path(palette.__file__).resolve()
    assert [place for path in sources if path != palette_itself for place in named_colours(path)] == []
    assert named_colours(palette_itself)


def predicted_report(preset: str, ranks: int = 4) -> Report:
    return from_size(10**6, None, None).predict(Plan.preset(preset, precision="fp32"), ranks, Settings())


def test_a_plans_picture_names_what_it_shows():
    matplotlib = pytest.importorskip("matplotlib")
    reports = {preset: predicted_report(preset) for preset in ("zero0", "zero3")}
    with matplotlib.rc_context(palette.STYLE):
        figure = draw_reports("a model", reports, memory_bytes=2**30)
    left, right = figure.axes
    assert figure.get_suptitle().strip() == summarize_reports(reports)
    assert left.get_title("left") == "Memory of a rank, MiB" and right.get_title("left").startswith("Sent by a rank")
    assert [text.get_text() for text in left.get_legend().get_texts()] == [
        "parameters",
        "gradients",
        "optimizer states",
        "buffers",
    ]
    assert {text.get_text() for text in left.texts} >= {"a rank has 1.00 GiB"}
    assert [text.get_text() for text in left.get_yticklabels()] == list(reports)


def test_a_picture_of_offload_has_the_other_memories_between():
    matplotlib = pytest.importorskip("matplotlib")
    with matplotlib.rc_context(palette.STYLE):
        left, middle, _ = draw_reports(
            "a model", {preset: predicted_report(preset) for preset in ("zero3", "infinity-states")}
        ).axes
    assert left.get_title("left").startswith("Memory of a rank")
    assert middle.get_title("left").startswith("Off the device")
    assert [text.get_text() for text in middle.get_legend().get_texts()] == ["host", "nvme"]
    assert middle.texts[0].get_text() == "nothing"


def test_the_finding_is_who_holds_the_least():
    assert re.fullmatch(
        r"zero3 holds .* a rank, zero0 .*",
        summarize_reports({name: predicted_report(name) for name in ("zero0", "zero3")}),
    )
    alone = {name: predicted_report(name, ranks=1) for name in ("zero0", "zero1")}
    assert summarize_reports(alone).startswith("Every preset holds 15.28 MiB")
