"""The comparison of training steps: its arithmetic, its workload, and whole runs of tiny sizes."""

from __future__ import annotations

import argparse
import json
import shlex
import sys

import pytest
import torch

from benchmarks.step import compare as comparing
from benchmarks.step import memory
from benchmarks.step.compare import (
    BASELINE,
    COMPUTE,
    ComparisonEntry,
    add_beyond_plan,
    add_comparison_options,
    preset_entry,
    run_comparison,
)
from benchmarks.step.workload import GPTWorkload, gpt_loss
from npuzero.bench import Record
from npuzero.errors import BenchmarkError

CPU = torch.device("cpu")
TINY = shlex.split("--dim 32 --layers 2 --heads 2 --sequence 16 --batch 1 --rounds 1 --checked 2 --visit 0.001")


def parse_step_options(*more: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    add_comparison_options(parser)
    return parser.parse_args([*TINY, *more])


def test_the_workload_is_the_one_that_figures_are_quoted_for():
    with torch.device("meta"):
        model = GPTWorkload().model()
    assert sum(parameter.numel() for parameter in model.parameters()) == 25_613_312


def test_batches_differ_by_rank_and_step_and_repeat():
    sizes = GPTWorkload(batch=2, sequence=8)
    batches = {(rank, step): sizes.tokens(rank, step) for rank in range(3) for step in range(3)}
    assert len({tuple(batch.flatten().tolist()) for batch in batches.values()}) == 9
    assert torch.equal(batches[1, 2], sizes.tokens(1, 2))
    assert batches[0, 0].shape == (2, 9)


def test_there_is_something_to_learn():
    sizes = GPTWorkload(dim=32, layers=1, heads=2, vocabulary=16, sequence=16)
    model = sizes.model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(60):
        loss = gpt_loss(model, sizes.tokens(0, step))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    assert loss.item() < 2.0  # from ln 16 = 2.77 towards ln 4 = 1.39


def test_the_peak_is_of_what_was_held_since_reset():
    gone = torch.ones(64 << 18)
    del gone
    assert memory.reset_peak_bytes(CPU)
    before = memory.current_resident_bytes(CPU)
    assert memory.peak_resident_bytes(CPU) - before < 4 << 20
    held = torch.ones(16 << 18)
    del held
    assert 15 << 20 < memory.peak_resident_bytes(CPU) - before < 24 << 20


def test_activations_are_no_part_of_what_lies_beyond_the_plan():
    values = {
        BASELINE: {"base_bytes": 10, "plan_bytes": 20, "peak_bytes": 60},
        "ours": {"base_bytes": 15, "plan_bytes": 100, "peak_bytes": 155},
        "peer": {"base_bytes": 15, "plan_bytes": None, "peak_bytes": 155},
    }
    add_beyond_plan(values)
    assert values["ours"]["activations_bytes"] == 30
    assert values["ours"]["beyond_plan"] == pytest.approx(0.1)  # 155 - 15 - 30 is 110
    assert "beyond_plan" not in values["peer"] and "beyond_plan" not in values[BASELINE]


@pytest.mark.slow
@pytest.mark.world
def test_a_run_leaves_a_record_and_says_what_is_missing(tmp_path, capsys):
    out, trace = tmp_path / "record.json", tmp_path / "trace.json"
    broken = ComparisonEntry("broken", "benchmarks.step.contenders:no-such", peer=True)
    entries = [COMPUTE, broken, preset_entry("zero2")]
    run_comparison("step", entries, parse_step_options("--out", str(out)), trace=trace, missing={"gone": "no wheel"})
    result = Record.read(out).result("step/bf16-batch1")
    assert set(result.seconds) == {BASELINE, "npuzero zero2"}
    assert result.parameters["missing"].keys() == {"gone", "broken"}
    assert "no-such" in result.parameters["missing"]["broken"]
    assert {"forward", "backward", "update"} <= result.values["npuzero zero2"]["parts_s"].keys()
    printed = capsys.readouterr().out
    assert "no wheel" in printed and "npuzero zero2" in printed
    content = json.loads(trace.read_text())
    events = content["traceEvents"]
    assert content["otherData"]["title"].startswith("One training step of npuzero zero2: 2 ranks, bf16")
    assert {event["pid"] for event in events} == {0, 1}
    assert {"forward", "backward", "update"} <= {event["name"] for event in events}


@pytest.mark.slow
@pytest.mark.world
def test_no_figure_is_taken_of_one_that_learns_something_else(monkeypatch):
    monkeypatch.setitem(comparing.BANDS, "bf16", 1e-9)
    with pytest.raises(BenchmarkError, match="losses of npuzero zero1") as caught:
        run_comparison("step", [COMPUTE, preset_entry("zero1")], parse_step_options())
    assert "1e-09" in caught.value.expected


def test_the_interpreter_of_our_own_contenders_is_this_one():
    assert COMPUTE.python == sys.executable
