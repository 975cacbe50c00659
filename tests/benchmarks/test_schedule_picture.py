"""The picture of a pipeline's step: a box for each act where it was, the plan in the run's own times."""

from __future__ import annotations

import pytest

matplotlib = pytest.importorskip("matplotlib")

from benchmarks.axes.schedule_picture import draw_timelines, planned_timeline, plot_schedule  # noqa: E402 - after it is known that matplotlib is there
from npuzero.cli.output.palette import STYLE  # noqa: E402
from npuzero.parallel.pipeline_parallel.schedule import ScheduleTimeline, schedule, simulate  # noqa: E402


def late_rank_timeline(name: str) -> ScheduleTimeline:
    """A run of acts of 10, and 20 or twice 10 ms, that began at 5 s and whose second rank was late by 4 ms."""
    acts = simulate(schedule(name, 2, 3), 0.010, 0.020).acts
    return ScheduleTimeline(tuple(each._replace(begin=each.begin + 5 + 0.004 * each.rank,
        end=each.end + 5 + 0.004 * each.rank)
                          for each in acts))  # fmt: skip


@pytest.mark.parametrize("name", ["1f1b", "zero-bubble"])
def test_the_plan_takes_the_times_of_the_run(name):
    plan = planned_timeline(schedule(name, 2, 3), late_rank_timeline(name))
    assert float(plan.makespan) == pytest.approx(float(simulate(schedule(name, 2, 3), 0.010, 0.020).makespan))


def test_each_act_has_a_box_where_it_was():
    ran = late_rank_timeline("1f1b")
    with matplotlib.rc_context(STYLE):
        figure = draw_timelines({"As it ran": ran}, {"title": "a step"})
    (axes,) = figure.axes
    boxes = sorted((box.y0 + 0.4, box.x0, box.x1) for bars in axes.collections for box in
                   [bars.get_paths()[0].get_extents()])  # fmt: skip
    there = sorted((each.rank, 1000 * (each.begin - 5), 1000 * (each.end - 5)) for each in ran.acts)
    assert boxes == [pytest.approx(each) for each in there]
    assert sorted(text.get_text() for text in axes.texts) == sorted(f"{t.act.stage}.{t.act.micro}" for t in ran.acts)
    assert axes.get_title("left").startswith("As it ran: 120 ms, bubble 25%; alive at most 2, 1")
    matplotlib.pyplot.close(figure)


def test_plan_and_run_are_drawn_into_a_file(tmp_path):
    plot_schedule(schedule("zero-bubble", 2, 3), late_rank_timeline("zero-bubble"), tmp_path / "step.png", {})
    assert (tmp_path / "step.png").read_bytes().startswith(b"\x89PNG")
