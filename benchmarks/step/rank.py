"""One rank of one contender: a process that takes orders, a JSON object a line, on stdin and answers each on stdout.

    {"do": "train", "steps": n}             losses of the next n steps
    {"do": "time", "steps": n}              seconds per step, of n steps after one that is not counted
    {"do": "look", "steps": n}              seconds of each part of a step, spans of npuzero, page faults, peak memory
    {"do": "trace", "steps": n}             events of npuzero and the parts of a step, for a Chrome trace

The launcher's variables (RANK, WORLD_SIZE, MASTER_ADDR, ...) say which rank it is. What libraries print goes to stderr.
A step that is timed begins where the last one's update returned, so what an update leaves under way is in the time of
the next step, and as many updates are counted as steps.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import sys
import time
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch

from benchmarks.step import memory
from benchmarks.step.contenders import Steps
from benchmarks.step.workload import Workload, loss_of


class Rank:
    """Builds the contender and takes steps with it."""

    def __init__(self, contender: str, workload: Workload, batches: list[int]) -> None:
        device = torch.device("cpu")
        self.base_bytes = memory.now_bytes(device)
        module, _, name = contender.partition(":")
        begin_s = time.perf_counter()
        self.steps: Steps = importlib.import_module(module).CONTENDERS[name](workload.model(), workload)
        self.built_s = time.perf_counter() - begin_s
        self.device = next(self.steps.model.parameters()).device
        if self.device.type != "cpu":
            self.base_bytes = 0
        self._workload, self._batches, self._taken = workload, batches, 0
        self._last: torch.Tensor | None = None

    def hello(self) -> dict[str, Any]:
        return {
            "built_s": self.built_s,
            "base_bytes": self.base_bytes,
            "parameters": sum(p.numel() for p in self._workload.model().parameters()),
            "facts": self.steps.facts or {},
        }

    def train(self, steps: int) -> dict[str, Any]:
        losses = []
        for _ in range(steps):
            self._step()
            losses.append(self._last.item())
        return {"losses": losses}

    def time(self, steps: int) -> dict[str, Any]:
        self._step()
        self._synchronize()
        begin_s = time.perf_counter()
        for _ in range(steps):
            self._step()
        self._synchronize()
        return {"seconds": (time.perf_counter() - begin_s) / steps}

    def look(self, steps: int) -> dict[str, Any]:
        parts: dict[str, float] = defaultdict(float)

        def mark(part: str, begin_s: float) -> float:
            self._synchronize()
            end_s = time.perf_counter()
            parts[part] += (end_s - begin_s) / steps
            return end_s

        self._step()
        faults = memory.page_faults()
        with _events() as events:
            memory.reset(self.device)
            for _ in range(steps):
                self._step(mark)
            peak = memory.peak_bytes(self.device)
        spans: dict[str, float] = defaultdict(float)
        for event in events:
            if "begin_s" in event:
                spans[event["category"]] += (event["end_s"] - event["begin_s"]) / steps
        return {
            "parts": parts,
            "spans": spans,
            "page_faults": (memory.page_faults() - faults) / steps,
            "peak_bytes": peak,
        }

    def trace(self, steps: int) -> dict[str, Any]:
        """Spans of the parts of a step too, on the same clock."""
        rank = int(os.environ.get("RANK", 0))
        rows: list[dict[str, Any]] = []

        def mark(part: str, begin_s: float) -> float:
            end_s = time.perf_counter()
            rows.append(
                {"category": "step", "name": part, "begin_s": begin_s, "end_s": end_s, "rank": rank, "facts": {}}
            )
            return end_s

        self._step()
        with _events() as events:
            for _ in range(steps):
                self._step(mark)
        return {"events": rows + events}

    def _step(self, mark: Callable[[str, float], float] = lambda part, begin_s: begin_s) -> None:
        begin_s = time.perf_counter()
        tokens = torch.cat([self._workload.tokens(rank, self._taken) for rank in self._batches]).to(self.device)
        self._taken += 1
        begin_s = mark("data", begin_s)
        with self.steps.forward():
            loss = loss_of(self.steps.model, tokens)
        begin_s = mark("forward", begin_s)
        self.steps.backward(loss)
        begin_s = mark("backward", begin_s)
        self.steps.update()
        mark("update", begin_s)
        self._last = loss.detach()

    def _synchronize(self) -> None:
        if self.device.type != "cpu":
            getattr(torch, self.device.type).synchronize()


class _events:
    """npuzero's events while a ``with`` block runs, as dicts; none where the contender has not imported it."""

    def __enter__(self) -> list[dict[str, Any]]:
        self.rows: list[dict[str, Any]] = []
        self._observe = sys.modules.get("npuzero.observe")
        if self._observe is not None:
            self._sink = self._observe.Events()
            self._observe.add_sink(self._sink)
        return self.rows

    def __exit__(self, *_: object) -> None:
        if self._observe is not None:
            self._observe.remove_sink(self._sink)
            self.rows += [vars(event) for event in self._sink.events]


def main() -> None:
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what a library prints is no answer
    parser = argparse.ArgumentParser()
    parser.add_argument("--contender", required=True, help="module:name, an entry of the module's CONTENDERS")
    parser.add_argument("--batches", required=True, help="whose batches this rank takes: ranks, with commas")
    Workload.add_options(parser)
    options = parser.parse_args()
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", 1)))
    rank = Rank(options.contender, Workload.of(options), [int(word) for word in options.batches.split(",")])
    print(json.dumps(rank.hello()), file=answers)
    for line in sys.stdin:
        order = json.loads(line)
        print(json.dumps(getattr(rank, order["do"])(order["steps"]), default=str), file=answers)


if __name__ == "__main__":
    main()
