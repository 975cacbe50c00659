"""``npuzero plan --pipe`` prints the bytes that each rank of a pipeline holds and sends in training."""

from __future__ import annotations

import json
import sys
from typing import Any

import pytest

import npuzero
from npuzero.cli import main
from npuzero.comm import World, run_threads
from npuzero.parallel.pipeline_parallel.schedule import schedule
from npuzero.plan import DATA, PIPE
from parallel.tensor_models import BATCH, HIDDEN, SEQUENCE, tensor_batch
from world.conftest import one_thread_per_rank  # noqa: F401
from world.toy import build_seeded_model

from .test_cli_axes import MODELS, told  # noqa: F401 - a fixture

MICRO_BATCHES = 2
TOKENS = BATCH // MICRO_BATCHES * SEQUENCE


@pytest.mark.parametrize(
    ("name", "kind", "chunks", "preset"),
    [("llama", "1f1b", 1, "zero3"), ("tied", "gpipe", 1, "zero2"), ("llama", "interleaved", 2, "zero1")],
)
def test_ranks_hold_and_send_what_plan_says(name: str, kind: str, chunks: int, preset: str, told: Any) -> None:  # noqa: F811
    options = ("--micro-batches", MICRO_BATCHES, "--tokens", TOKENS, "--precision", "fp32")
    facts = told(name, "--world", 4, "--pipe", 2, "--schedule", kind, "--chunks", chunks, *options)

    def rank(world: World) -> tuple[int, npuzero.Report]:
        mesh = npuzero.mesh(pipe=2, local_size=2, world=world)
        sizes = {"schedule": kind, "chunks": chunks, "micro_batches": MICRO_BATCHES}
        pipe = npuzero.pipeline(build_seeded_model(make=MODELS[name]), mesh, plan=preset, **sizes)
        optimizer = npuzero.AdamW(pipe.parameters())
        for step in range(2):
            pipe.step(**tensor_batch(step, mesh.index(DATA)))
            optimizer.step()
            optimizer.zero_grad()
        return mesh.index((PIPE,)), npuzero.report(pipe)

    held = facts["pipeline"]["bytes_held_by_rank"][preset]
    fullest = max(range(2), key=lambda index: sum(held[index].values()))
    for index, report in run_threads(4, rank):
        assert report.bytes_held == held[index]
        if index == fullest:
            assert report.bytes_sent == facts["presets"][preset]["bytes_sent"]
            assert facts["presets"][preset]["bytes_held"] == held[index]
    sends = facts["presets"][preset]["bytes_sent_along"]["pipe"]["send"]
    assert sends == MICRO_BATCHES * (2 * chunks - 1) * TOKENS * HIDDEN * 4


@pytest.mark.parametrize("mode", ["mtp", "msp"])
def test_tensor_ranks_each_send_a_part(mode: str, told: Any) -> None:  # noqa: F811
    options = ("--micro-batches", MICRO_BATCHES, "--tokens", TOKENS, "--precision", "fp32")
    facts = told("llama", "--world", 4, "--pipe", 2, "--tensor", 2, "--mode", mode, *options)

    def rank(world: World) -> tuple[int, npuzero.Report]:
        mesh = npuzero.mesh(pipe=2, tensor=2, world=world)
        model = npuzero.parallel.tensor(build_seeded_model(make=MODELS["llama"]), mesh, mode)
        pipe = npuzero.pipeline(model, mesh, plan="zero2", micro_batches=MICRO_BATCHES)
        optimizer = npuzero.AdamW(pipe.parameters())
        pipe.step(**tensor_batch(0, 0))
        optimizer.step()
        return mesh.index((PIPE,)), npuzero.report(pipe)

    for index, report in run_threads(4, rank):
        assert report.bytes_held == facts["pipeline"]["bytes_held_by_rank"]["zero2"][index]
        assert report.bytes_sent["send"] == facts["presets"]["zero2"]["bytes_sent_along"]["pipe"]["send"]
        assert report.bytes_sent["send"] == MICRO_BATCHES * TOKENS * HIDDEN * 4 // 2


def test_it_tells_the_schedule(told: Any) -> None:  # noqa: F811
    facts = told("llama", "--world", 8, "--pipe", 4, "--micro-batches", 8)["pipeline"]
    table = schedule("1f1b", 4, 8)
    assert facts["bubble"] == float(table.bubble) and facts["peak"] == [4, 3, 2, 1]
    assert len(facts["stages"]) == 4
    text = told("llama", "--world", 8, "--pipe", 4, "--micro-batches", 8, form="text")
    assert "a rank waits 27.3% of a step" in text and "by rank: 4, 3, 2, 1" in text and "fullest rank" in text


def test_parameters_stay_unsharded_between_micro_batches_where_memory_allows(capsys: Any) -> None:
    for size, kept in (("2GiB", True), ("1GiB", False)):
        options = ["--world", "4", "--pipe", "2", "--micro-batches", "4", "--memory", size, "--json"]
        assert main(["plan", "--parameters", "100M", *options]) == 0
        facts = json.loads(capsys.readouterr().out)
        assert facts["pipeline"]["unsharded_between"]["zero3"] is kept


def test_transformers_and_its_own_arithmetic_say_the_same(told: Any, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: F811
    both = []
    for module in (sys.modules.get("transformers"), None):
        if module is None:
            monkeypatch.setitem(sys.modules, "transformers", None)
        both.append(told("tied", "--world", 4, "--pipe", 2, "--micro-batches", 4, "--tokens", 8))
    assert both[0]["presets"] == both[1]["presets"]


def test_a_size_alone_is_cut_as_well(capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--world", "8", "--local", "4", "--pipe", "2", "--tensor", "2", "--tokens", "64", "--micro-batches", "4"]
    assert main(["plan", "--parameters", "20M", "--vocabulary", "128", *options, "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    held = [each["parameters"] for each in facts["pipeline"]["bytes_held_by_rank"]["zero0"]]
    assert sum(held) == pytest.approx(
        facts["parameters"], rel=0.02
    )  # bfloat16, over two tensor ranks; the embedding twice
    assert facts["presets"]["zero0"]["bytes_sent_along"].keys() == {"pipe", "local", "ends", "tensor"}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--schedule", "gpipe"), "--schedule: expected --pipe 2 or more"),
        (("--pipe", 8), "at most as many as there are blocks"),
        (("--pipe", 2, "--schedule", "interleaved", "--chunks", 2, "--micro-batches", 3), "ranks divide"),
        (("--pipe", 3), "pipe"),
        (("--pipe", 2, "--tiles", "lm_head=2"), "--tiles"),
    ],
)
def test_what_cannot_be_is_refused(options: tuple[Any, ...], message: str, told: Any) -> None:  # noqa: F811
    assert message in told("llama", "--world", 8, *options, form="error")
