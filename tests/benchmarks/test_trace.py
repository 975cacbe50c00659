"""The picture of a step: waiting is not computing, and all that is drawn is named."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

matplotlib = pytest.importorskip("matplotlib")

from benchmarks import trace  # noqa: E402 - after it is known that matplotlib is there
from benchmarks.trace import (  # noqa: E402
    TraceSpan,
    draw_trace,
    last_step,
    measured_timeline,
    merge_near_spans,
    short_span_name,
    subtract_spans,
    summarize_trace,
)
from npuzero.cli.output.palette import STYLE, WORK  # noqa: E402
from npuzero.errors import ConfigError  # noqa: E402
from npuzero.parallel.pipeline_parallel.schedule import schedule, simulate  # noqa: E402

RECORD = Path(__file__).resolve().parents[2] / "benchmarks" / "results" / "trace" / "step.json"


def trace_event(category: str, name: str, begin_ms: float, end_ms: float, rank: int = 0) -> dict:
    return {
        "ph": "X", "pid": rank, "cat": category, "name": name,
        "ts": 1000 * begin_ms, "dur": 1000 * (end_ms - begin_ms), "args": {},
    }  # fmt: skip


STEP = [
    trace_event("step", "forward", 100, 140),
    trace_event("step", "backward", 140, 200),
    trace_event("step", "update", 200, 220),
    trace_event("wait for gather", "root", 110, 120),
    trace_event("comm gather", "gather root", 110, 120),
    trace_event("comm gather", "gather blocks.0", 125, 135),
    trace_event("comm reduce", "reduce blocks.0[0]", 150, 170),
    trace_event("comm control", "gradient norm", 205, 210),
]
BEFORE = [
    trace_event("step", "forward", 0, 50),
    trace_event("step", "backward", 50, 90),
    trace_event("step", "update", 90, 99),
]


def test_the_last_step_begins_at_nought():
    spans = last_step([*BEFORE, *STEP, {"ph": "i", "pid": 0, "cat": "start", "name": "x", "ts": 0}])
    assert [span.name for span in spans if span.category == "step"] == ["forward", "backward", "update"]
    assert spans[0] == TraceSpan(0, "step", "forward", 0.0, 40.0) and max(span.end for span in spans) == 120.0


def test_what_is_waited_for_is_not_computed():
    forward = TraceSpan(0, "step", "forward", 0, 40)
    waits = [TraceSpan(0, "wait for gather", "b", 30, 50), TraceSpan(0, "wait for gather", "a", 10, 20)]
    assert subtract_spans(forward, waits) == [(0, 10), (20, 30)]
    assert subtract_spans(forward, []) == [(0, 40)] and subtract_spans(forward, [TraceSpan(0, "w", "a", 0, 40)]) == []


def test_waits_near_each_other_share_a_label():
    spans = [TraceSpan(0, "w", "b", 12, 14), TraceSpan(0, "w", "a", 0, 10), TraceSpan(0, "w", "c", 90, 91)]
    assert merge_near_spans(spans, near=5) == [(7.0, 12), (90.5, 1)]


def test_units_are_named_briefly():
    names = ("gather root", "reduce blocks.3[0]", "gradient norm", "parameters in use")
    assert [short_span_name(name) for name in names] == ["root", "3", "norm", "vote"]


def test_the_picture_names_every_segment_and_computes_nowhere_while_it_waits():
    spans = last_step(STEP)
    assert summarize_trace(spans).startswith("67% of communication")  # 45 ms, of which 15 are waited for
    with matplotlib.rc_context(STYLE):
        figure = draw_trace(spans, {"title": "a step"})
    (axes,) = figure.axes
    assert axes.get_title("left") == "Rank 0: 45 ms of collectives, 15 ms waited for"
    assert {"forward", "backward", "update", "wait 10 ms", "wait 5 ms", "root", "0", "norm"} <= {
        text.get_text() for text in axes.texts
    }
    boxes: dict[str, list[tuple[float, float]]] = {"compute": [], "waiting": []}
    for bars in axes.collections:
        face = bars.get_facecolor()
        for kind, found in boxes.items():
            if len(face) and matplotlib.colors.to_hex(face[0]).upper() == WORK[kind]:
                extents = [path.get_extents() for path in bars.get_paths()]
                found += [(extent.x0, extent.x1) for extent in extents]
    assert sorted(boxes["compute"]) == [(0, 10), (20, 40), (40, 100), (100, 105), (110, 120)]
    assert sorted(boxes["waiting"]) == [(10, 20), (105, 110)]


def test_the_committed_trace_is_drawn(tmp_path):
    trace.main([str(RECORD), "--out", str(tmp_path / "overlap.png")])
    assert (tmp_path / "overlap.png").read_bytes().startswith(b"\x89PNG")
    assert "zero3" in json.loads(RECORD.read_text("utf-8"))["otherData"]["title"]


def pipeline_trace_events(name: str, micro_batches: int, begin_ms: float) -> list[dict]:
    """A step over two stages, two ranks each, the second of which begin a millisecond later."""
    return [
        trace_event("pipeline", f"{act.kind} {act.stage} #{act.micro}", start + begin, start + end, 2 * rank + data)
        for rank, act, begin, end in simulate(schedule(name, 2, micro_batches), 10, 20).acts
        for data, start in enumerate((begin_ms, begin_ms + 1))
    ]


@pytest.mark.parametrize("name", ["1f1b", "zero-bubble"])
def test_a_pipelines_last_step_is_as_it_ran(name):
    found = measured_timeline([*pipeline_trace_events(name, 3, 0), trace_event("comm control", "x", 500, 600),
        *pipeline_trace_events(name, 3, 1000)],
                      schedule(name, 2, 3))  # fmt: skip
    plan = simulate(schedule(name, 2, 3), 0.010, 0.020)
    ran = {(each.rank, each.act): (each.begin, each.end) for each in found.acts}
    for rank, act, begin, end in plan.acts:
        assert ran.pop((rank, act)) == (pytest.approx(1 + begin), pytest.approx(1 + end))
    assert not ran and found.peak == plan.peak


def test_an_act_begins_when_what_it_takes_has_come():
    step = pipeline_trace_events("1f1b", 3, 0)
    late = [
        trace_event("comm stage 0>1", "stage 0>1 #1", 30, 44, rank=2),
        trace_event("comm stage 1>0", "stage 1>0 #0", 5, 20),
    ]
    plain, waiting = (measured_timeline(each, schedule("1f1b", 2, 3)).acts for each in (step, [*step, *late]))
    moved = [(one.act, other.begin - one.begin) for one, other in zip(plain, waiting, strict=True) if one != other]
    assert moved == [(("F", 1, 1), pytest.approx(0.004))]  # it was to run from 40 to 50 ms


def test_a_trace_without_one_of_the_acts_is_refused():
    with pytest.raises(ConfigError, match="'F 0 #3' on rank 0"):
        measured_timeline(pipeline_trace_events("1f1b", 3, 0), schedule("1f1b", 2, 4))


def test_plan_and_run_of_a_pipeline_are_drawn(tmp_path):
    facts = {"title": "a step", "schedule": {"name": "1f1b", "ranks": 2, "micro_batches": 3}}
    (tmp_path / "trace.json").write_text(
        json.dumps({"otherData": facts, "traceEvents": pipeline_trace_events("1f1b", 3, 0)})
    )
    trace.main([str(tmp_path / "trace.json"), "--out", str(tmp_path / "schedule.png")])
    assert (tmp_path / "schedule.png").read_bytes().startswith(b"\x89PNG")
