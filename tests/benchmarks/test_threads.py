"""What a step's threads do, counted: the counts themselves, and a whole run of a tiny model."""

from __future__ import annotations

import shlex
import sys
import threading
import time

import pytest

from benchmarks import threads
from npuzero.bench import Record


def spin(seconds: float) -> None:
    end_s = time.thread_time() + seconds
    while time.thread_time() < end_s:
        pass


def test_time_and_sleeps_are_those_of_the_thread_that_had_them():
    begun, go_on = threading.Event(), threading.Event()

    def work() -> None:
        spin(0.03)
        for _ in range(5):
            time.sleep(0.001)
        begun.set()
        go_on.wait()

    worker = threading.Thread(target=work, name="worker")
    before = threads.thread_counts()
    worker.start()
    begun.wait()
    after = threads.thread_counts()
    go_on.set()
    worker.join()
    assert 0.03 <= after["cpu_s of worker"] < 0.06
    assert after["sleeps of worker"] >= 5
    assert after["cpu_s of loop"] - before["cpu_s of loop"] < 0.03


def test_the_model_is_the_one_that_figures_are_quoted_for():
    pytest.importorskip("transformers")
    assert sum(parameter.numel() for parameter in threads.LlamaWorkload().model().parameters()) == 19_275_648


@pytest.mark.slow
def test_a_whole_run(monkeypatch, tmp_path):
    pytest.importorskip("transformers")
    out = tmp_path / "threads.json"
    tiny = "--dim 32 --layers 2 --heads 2 --vocabulary 64 --sequence 16 --batch 1 --rounds 1 --seconds 1 --counted 2"
    monkeypatch.setattr(sys, "argv", ["threads", *shlex.split(tiny), "--out", str(out)])
    threads.main()
    (result,) = Record.read(out).results
    assert set(result.seconds) == set(threads.CONTENDERS)
    assert result.values["npuzero zero3"]["cpu_s of npuzero-comm"] > 0
    assert "cpu_s of npuzero-comm" not in result.values[threads.BASELINE]
