"""The demo's summary and picture, from results as train.py writes them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import matplotlib
import pytest
from demo import STAGES, largest_difference, summarize
from plot import HELD, draw, plot

from npuzero.cli.output.palette import STYLE


def demo_result(*losses: float) -> dict[str, Any]:
    held, sent = dict.fromkeys(HELD, 1_000_000), {"all_gather": 500_000, "reduce_scatter": 500_000}
    return {
        "options": {"precision": "fp32"},
        "parameters": 1000,
        "ranks": 2,
        "losses": list(losses),
        "tokens_per_s": 1.0,
        "bytes_held": {"measured": held, "predicted": held},
        "bytes_sent": {"measured": sent, "predicted": sent},
        "held_out_loss": losses[-1],
        "held_out_loss_reloaded": losses[-1],
    }


def test_equal_stages_differ_by_nothing() -> None:
    assert largest_difference({stage: demo_result(3.0, 2.0) for stage in STAGES}) == 0


def test_the_least_difference_between_stages_is_seen() -> None:
    results = {stage: demo_result(3.0, 2.0) for stage in STAGES}
    results["zero2"] = demo_result(3.0, 2.0 + 2**-51)
    assert largest_difference(results) == 2**-51


@pytest.mark.parametrize("main", ["zero3", "hsdp"])
@pytest.mark.parametrize("steps", [1, 60])
def test_the_picture_is_drawn(main: str, steps: int, tmp_path: Path) -> None:
    results = {stage: demo_result(*range(steps, 0, -1)) for stage in dict.fromkeys([*STAGES, main])}
    summary = summarize(main, results, seconds=1.0)
    plot(summary, tmp_path / "curves.png")
    assert (tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG")
    assert list(summary["stages"]) == list(results)
    assert summary["held_out_loss"] == 1


def test_the_picture_says_that_equal_losses_are_equal_and_who_holds_the_least() -> None:
    results = {stage: demo_result(3.0, 2.0) for stage in STAGES}
    results["zero3"]["bytes_held"] = {source: dict.fromkeys(HELD, 500_000) for source in ("measured", "predicted")}
    with matplotlib.rc_context(STYLE):
        figure = draw(summarize("zero3", results, seconds=1.0))
        apart = draw({**summarize("zero3", results, seconds=1.0), "largest_difference_between_stages": 0.5})
    assert figure.get_suptitle().strip() == "Stage 3 holds 2.0 MB a rank where stage 0 holds 4.0"
    assert figure.axes[0].get_title("left") == "Losses, equal to the bit: the curves lie on one another"
    assert apart.axes[0].get_title("left") == "Losses, apart by up to 5.0e-01"
