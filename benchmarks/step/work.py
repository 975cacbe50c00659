"""One rank of one contender, for npuzero.bench's worker: ``make(rank, size, options)``, with the options

    contender   "module:name", an entry of the module's CONTENDERS
    batches     for each rank, the ranks with the batches that it takes, one after another
    workload    the fields of GPTWorkload

A visit begins with an uncounted step. An update that is still running then counts toward the next step, so that a visit
counts as many complete updates as steps.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch._dynamo  # noqa: F401 - torch imports it with the first optimizer, in every contender with one: 70 MB

from benchmarks.step import memory
from benchmarks.step.workload import GPTWorkload


def make(rank: int, size: int, options: dict[str, Any]) -> StepRank:
    """Make the rank named by the launcher's variables, which under torchrun differs from the team's."""
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    return StepRank(int(os.environ["RANK"]), options)


class StepRank:
    """Take steps. ``workload``: the class with the fields of options["workload"]."""

    def __init__(self, rank: int, options: dict[str, Any], workload: type[GPTWorkload] = GPTWorkload) -> None:
        module, _, name = options["contender"].partition(":")
        build = importlib.import_module(module).CONTENDERS[name]()
        self._rank = rank
        self._workload = workload(**options["workload"])
        self._batches: list[int] = options["batches"][rank]
        self._base_bytes = memory.current_resident_bytes(torch.device("cpu"))
        begin_s = time.perf_counter()
        self.steps = build(self._workload.model(), self._workload)
        self._made_s = time.perf_counter() - begin_s
        self._device = next(self.steps.model.parameters()).device
        if self._device.type != "cpu":
            self._base_bytes = 0  # an allocator's figures start there
        self._taken = 0

    def prepare(self) -> None:
        self.run()

    def run(self) -> None:
        self._step()

    def synchronize(self) -> None:
        if self._device.type != "cpu":
            getattr(torch, self._device.type).synchronize()

    def train(self, steps: int) -> list[float]:
        """Take steps and return their losses."""
        return [self._step().item() for _ in range(steps)]

    def update_s(self) -> float:
        """Take a step and return the seconds of its update alone."""
        parts: dict[str, float] = {}

        def mark(part: str, begin_s: float) -> float:
            self.synchronize()
            end_s = time.perf_counter()
            parts[part] = end_s - begin_s
            return end_s

        self._step(mark)
        return parts["update"]

    def peak(self) -> int:
        """Take a step and return its peak bytes, including the process's memory before it."""
        return int(self._held()["peak_bytes"])

    def look(self, steps: int) -> dict[str, Any]:
        """Observe the next steps, per step, and the memory of one more. Observation takes time: not for timing."""
        parts: dict[str, float] = defaultdict(float)

        def mark(part: str, begin_s: float) -> float:
            self.synchronize()
            end_s = time.perf_counter()
            parts[part] += (end_s - begin_s) / steps
            return end_s

        with record_events() as found:
            faults, disk = memory.page_faults(), memory.disk_bytes()
            for _ in range(steps):
                self._step(mark)
            faults = memory.page_faults() - faults
            disk = {way: (now - disk[way]) / steps for way, now in memory.disk_bytes().items()}
        spans: dict[str, float] = defaultdict(float)
        for event in found:
            if "end_s" in event:
                spans[event["category"]] += (event["end_s"] - event["begin_s"]) / steps
        return {
            "made_s": self._made_s,
            "plan_bytes": self.steps.plan_bytes,
            "parts_s": parts,
            "spans_s": spans,
            "page_faults": faults / steps,
            "disk_bytes": disk,
            **self._held(),
        }

    def _held(self) -> dict[str, Any]:
        """Return the memory of one step; a compute-only contender drops each gradient at once."""
        reset = memory.reset_peak_bytes(self._device)
        with contextlib.ExitStack() as hooks:
            if self.steps.only_computes:
                for parameter in self.steps.model.parameters():
                    hooks.callback(parameter.register_post_accumulate_grad_hook(_drop_gradient).remove)
            self._step()
        self.synchronize()
        return {
            "base_bytes": self._base_bytes,
            "peak_bytes": memory.peak_resident_bytes(self._device),
            "peak_is_of_one_step": reset,
            "shared_bytes": memory.shared_resident_bytes(self._device),
        }

    def trace(self, steps: int) -> list[dict[str, Any]]:
        """Record npuzero's events in the next steps, and a span for each part of a step."""
        parts: list[dict[str, Any]] = []

        def mark(part: str, begin_s: float) -> float:
            end_s = time.perf_counter()
            parts.append(
                {"category": "step", "name": part, "begin_s": begin_s, "end_s": end_s, "rank": self._rank, "facts": {}}
            )
            return end_s

        self.run()
        with record_events() as found:
            for _ in range(steps):
                self._step(mark)
        return parts + found

    def _step(self, mark: Callable[[str, float], float] = lambda part, begin_s: begin_s) -> torch.Tensor:
        """Take a step; return its loss, the mean over this rank's batches."""
        losses = []
        begin_s = time.perf_counter()
        for batch in self._batches:
            tokens = self._workload.tokens(batch, self._taken).to(self._device)
            begin_s = mark("data", begin_s)
            with self.steps.forward():
                loss = self.steps.loss(self.steps.model, tokens) / len(self._batches)
            begin_s = mark("forward", begin_s)
            self.steps.backward(loss)
            begin_s = mark("backward", begin_s)
            losses.append(loss.detach())
        self.steps.update()
        mark("update", begin_s)
        self._taken += 1
        return torch.stack(losses).sum()


@contextmanager
def record_events() -> Iterator[list[dict[str, Any]]]:
    """Record npuzero's events in the block, available at its end; none if npuzero is not imported."""
    found: list[dict[str, Any]] = []
    observe = sys.modules.get("npuzero.observe")
    if observe is None:
        yield found
        return
    with observe.recording(observe.Events()) as sink:
        yield found
    found += [vars(event) for event in sink.events]


def _drop_gradient(parameter: torch.Tensor) -> None:
    parameter.grad = None
