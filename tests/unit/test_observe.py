"""Events reach sinks in order, from any thread, and cost nothing without a sink."""

from __future__ import annotations

import json
import threading

import pytest

from npuzero import observe
from npuzero.errors import StorageError
from npuzero.observe import Count, Events, Instant, Span
from npuzero.observe.sinks import build_trace_events


@pytest.fixture(autouse=True)
def _rank_zero():
    yield
    observe.set_rank(0)
    observe.set_rank(0, process=True)
    assert not observe.enabled(), "a test left a sink behind"


def _emit_events():
    with observe.span("gather", "blocks.0", nbytes=64), observe.span("wait", "blocks.0"):
        observe.instant("prefetch", "blocks.1")
    observe.count("memory", "device", 12.0)


def test_without_a_sink_nothing_is_made():
    assert not observe.enabled()
    assert observe.span("gather", "a") is observe.span("reduce", "b")
    _emit_events()


def test_events_come_in_order_of_completion():
    with observe.recording(Events()) as sink:
        assert observe.enabled()
        _emit_events()
    assert [(type(event), event.category, event.name) for event in sink.events] == [
        (Instant, "prefetch", "blocks.1"),
        (Span, "wait", "blocks.0"),
        (Span, "gather", "blocks.0"),
        (Count, "memory", "device"),
    ]
    instant, inner, outer, counted = sink.events
    assert outer.begin_s <= inner.begin_s <= instant.at_s <= inner.end_s <= outer.end_s
    assert outer.facts == {"nbytes": 64} and counted.value == 12.0


def test_an_exception_passes_and_is_noted():
    with observe.recording(Events()) as sink, pytest.raises(KeyError), observe.span("update", "root"):
        raise KeyError("x")
    assert sink.events[0].facts == {"error": "KeyError"}


def test_each_thread_has_its_rank_and_others_the_process_rank():
    observe.set_rank(7, process=True)
    with observe.recording(Events()) as sink:

        def rank(number):
            observe.set_rank(number)
            for _ in range(100):
                observe.instant("step", "x")

        threads = [threading.Thread(target=rank, args=(number,)) for number in range(4)]
        threads.append(threading.Thread(target=lambda: observe.instant("step", "helper")))
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        observe.instant("step", "given", rank=9)
    ranks = [event.rank for event in sink.events]
    assert {number: ranks.count(number) for number in set(ranks)} == {0: 100, 1: 100, 2: 100, 3: 100, 7: 1, 9: 1}


def test_emit_takes_events_whose_ends_are_known_afterwards():
    event = Span("collective", "all_gather", 1.0, 2.0, 3)
    observe.emit(event)
    with observe.recording(Events()) as sink:
        observe.emit(event)
    assert sink.events == [event]


def test_a_span_belongs_to_the_sinks_there_were_when_it_began():
    early, late = Events(), Events()
    observe.add_sink(early)
    with observe.span("gather", "a"):
        observe.add_sink(late)
        observe.remove_sink(early)
    observe.remove_sink(late)
    observe.remove_sink(late)
    assert len(early.events) == 1 and late.events == []


def test_counters_keep_sums():
    with observe.recording(observe.Counters()) as sink:
        observe.emit(Span("gather", "a", 1.0, 1.5, 0))
        observe.emit(Span("gather", "a", 2.0, 2.25, 0))
        observe.instant("prefetch", "a")
        observe.count("memory", "device", 5)
        observe.count("memory", "device", 4)
    gather = sink.totals["gather", "a"]
    assert (gather.times, gather.seconds) == (2, 0.75)
    assert sink.totals["prefetch", "a"].times == 1
    assert sink.totals["memory", "device"].value == 4


def test_json_lines(tmp_path):
    path = tmp_path / "events.jsonl"
    with observe.recording(observe.JsonLines(path)):
        _emit_events()
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    assert [row["kind"] for row in rows] == ["instant", "span", "span", "count"]
    assert rows[2]["category"] == "gather" and rows[2]["facts"] == {"nbytes": 64}


def test_chrome_trace_has_a_process_per_rank_and_a_lane_per_category(tmp_path):
    path = tmp_path / "trace.json"
    with observe.recording(observe.ChromeTrace(path)) as sink:
        for rank in (0, 1):
            observe.set_rank(rank)
            _emit_events()
    sink.close()
    rows = json.loads(path.read_text())["traceEvents"]
    assert [row["ph"] for row in rows[:4]] == ["i", "X", "X", "C"]
    names = {(row["pid"], row["tid"]): row["args"]["name"] for row in rows if row["name"] == "thread_name"}
    assert sorted(names.values()) == sorted(["prefetch", "wait", "gather", "memory"] * 2)
    for row in rows:
        if row["ph"] == "X":
            assert row["dur"] >= 0 and names[row["pid"], row["tid"]] == row["cat"]
    assert {row["pid"]: row["args"]["name"] for row in rows if row["name"] == "process_name"} == {
        0: "rank 0",
        1: "rank 1",
    }


def test_trace_times_are_microseconds():
    row = build_trace_events([Span("gather", "a", 1.0, 1.5, 2)])[0]
    assert (row["ts"], row["dur"], row["pid"]) == (1e6, 0.5e6, 2)


@pytest.mark.parametrize("kind", [observe.ChromeTrace, observe.JsonLines])
def test_a_file_that_cannot_be_written_is_a_storage_error(kind, tmp_path):
    with (
        pytest.raises(StorageError, match="a file that can be written"),
        observe.recording(kind(tmp_path / "no" / "f")),
    ):
        observe.instant("a", "b")


def test_profiler_ranges_show_in_torch_profiler():
    torch_profiler = pytest.importorskip("torch.profiler")
    activities = [torch_profiler.ProfilerActivity.CPU]
    with torch_profiler.profile(activities=activities) as profile, observe.recording(observe.ProfilerRanges()):
        _emit_events()
    names = {event.name for event in profile.events()}
    assert {"npuzero.gather blocks.0", "npuzero.wait blocks.0"} <= names
