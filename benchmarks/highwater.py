"""Peak memory and growth of a process with four times as many bytes of optimizer states as memory for them.

    python -m benchmarks.highwater --folder /mnt/disk --out runs/bench/highwater.json      # about 5 minutes
    python -m benchmarks.highwater --folder /mnt/disk --layers 32 --steps 50

A GPT trains with states in files. npuzero may hold on the host the gradients and a quarter of the states' bytes
(``host_bytes``). The process may hold in total its memory after all imports (the base), ``npuzero.predict``'s bytes of
device and host (the plan), and 5 % more: for activations, a unit's gradients before they are packed, and the
allocator's reserves. If a control group can be created (Linux, as root), the kernel kills a process that exceeds this;
the kernel's tables and page cache then count, and are included in the base. Memory is the kernel's high-water mark;
before each update, when none is running, it is the anonymous pages, with shared ones counted in proportion. Goals: at
most that peak, and growth below one page per step. malloc retains between 0 and some 10 MB of freed memory, which would
hide growth: in every tenth step it is returned first. Growth compares the medians of the memory in these steps, after
the first steps, between the first half and the second.
"""

from __future__ import annotations

import argparse
import ctypes
import math
import os
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, replace
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch._dynamo  # noqa: F401 - torch imports it with the first optimizer: 70 MB of the base

import npuzero
from benchmarks.step import memory
from benchmarks.step.workload import MAX_NORM, GPTWorkload, gpt_loss
from npuzero.bench import Record, Result, Team, format_command, machine_fingerprint, python_worker
from npuzero.bench.group import open_control_group
from npuzero.errors import BenchmarkError
from npuzero.plan import FAR_CHUNK_BYTES

NAME, OWN = "highwater", "npuzero"
#: Bytes of states divided by bytes of memory for them.
TIMES = 4
#: Chunks that fit into that memory: a few are in flight at a time.
CHUNKS = 16
BEYOND = 0.05
#: Bytes per step that do not count as growth: a page.
PAGE = 4096
#: Steps before the first measurement; and steps per line of progress, with freed memory returned in the last.
FIRST, A_LINE = 10, 10


def make(rank: int, size: int, options: dict[str, Any]) -> HighWaterRank:
    """Make the rank for npuzero.bench's worker."""
    return HighWaterRank(options)


class HighWaterRank:
    """Train, and inspect this process."""

    def __init__(self, options: dict[str, Any]) -> None:
        self._sizes, self._plan = GPTWorkload(**options["workload"]), npuzero.Plan.preset(**options["plan"])
        self._folder = options["folder"]
        torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
        npuzero.init("cpu")
        self._taken = 0
        tiny = replace(self._sizes, dim=64, layers=1, heads=1)
        gpt_loss(tiny.model().to(tiny.dtype), tiny.tokens(0, 0)).backward()  # starts threads, fills caches

    def base(self) -> int:
        """Reset the high-water mark; return the memory held before the model exists."""
        memory.reset_peak_bytes(torch.device("cpu"))
        return memory.current_resident_bytes(torch.device("cpu"))

    def start(self) -> dict[str, int]:
        """Build the model unit by unit; return the bytes of states, of memory for them, and of the plan."""
        with torch.device("meta"):
            model = self._sizes.model()
        whole = npuzero.predict(model, self._plan, 1, clip=True).held
        states = whole[npuzero.Memory.NVME]["states"]
        room = states // TIMES
        chunk = min(FAR_CHUNK_BYTES, room // CHUNKS)
        host = room + whole[npuzero.Memory.HOST]["gradients"]
        settings = npuzero.Settings(nvme_paths=(self._folder,), chunk_bytes=chunk, host_bytes=host)
        plan = npuzero.predict(model, self._plan, 1, clip=True, settings=settings)
        self._model = npuzero.zero(model, plan=self._plan, settings=settings)
        self._optimizer = npuzero.AdamW(model.parameters(), **self._sizes.hyper)
        held = plan.memory
        return {
            "states_bytes": states,
            "states_room_bytes": room,
            "chunk_bytes": chunk,
            "plan_bytes": held["device"] + held["host"],
        }

    def train(self, steps: int) -> list[tuple[float, int]]:
        """Take steps; return the seconds of each, and the memory before its update, when none is running.

        In the last step freed memory is returned first.
        """
        return [self._step(give_back=left == 1) for left in range(steps, 0, -1)]

    def peak(self) -> int:
        """Return the peak since :meth:`base`."""
        return memory.peak_resident_bytes(torch.device("cpu"))

    def _step(self, give_back: bool) -> tuple[float, int]:
        begin_s = time.perf_counter()
        loss = gpt_loss(self._model, self._sizes.tokens(0, self._taken))
        loss.backward()
        npuzero.clip_grad_norm_(self._model, MAX_NORM)
        if give_back:
            ctypes.CDLL(None).malloc_trim(0)
        held = memory.current_resident_bytes(torch.device("cpu"))
        self._optimizer.step()
        self._optimizer.zero_grad()
        self._taken += 1
        if not math.isfinite(loss.item()):
            raise ValueError(f"loss {loss.item()} in step {self._taken}")
        return time.perf_counter() - begin_s, held


def growth_per_step(held: Sequence[float]) -> float:
    """Return the growth in bytes per step between both halves, of the steps that return freed memory.

    held: of every step, in order; the last of each A_LINE returns freed memory.
    """
    bare = held[A_LINE - 1 :: A_LINE]
    half = len(bare) // 2
    return (median(bare[-half:]) - median(bare[:half])) / ((len(bare) - half) * A_LINE)


def measure_high_water(options: argparse.Namespace) -> Result:
    """Train in a process under a cap."""
    sizes, plan = GPTWorkload.of(options), {"name": options.plan, "precision": options.precision}
    told = {"workload": asdict(sizes), "plan": plan, "folder": str(options.folder)}
    with ExitStack() as stack:
        capped = stack.enter_context(open_control_group())
        command = python_worker(__spec__.name if __spec__ else __name__)
        command = command if capped is None else capped.command(command)
        team = stack.enter_context(Team(OWN, command, 1, options=told, threads=options.threads, timeout_s=400.0))
        (base,) = team.ask("base")
        counted = base if capped is None else capped.used()  # includes page cache and the kernel's tables
        (facts,) = team.ask("start")
        allowed = base + facts["plan_bytes"]
        cap = int((1 + BEYOND) * (counted + facts["plan_bytes"]))
        say = (
            f"states of {format_mb(facts['states_bytes'])}, memory for them "
            f"{format_mb(facts['states_room_bytes'])}; the process:"
        )
        print(f"{say} {format_mb(base)} + plan {format_mb(facts['plan_bytes'])}, cap {format_mb(cap)}", flush=True)
        if capped is not None:
            capped.limit(cap)
        seen: list[tuple[float, int]] = []
        while len(seen) < FIRST + options.steps:
            seen += team.ask("train", steps=min(A_LINE, FIRST + options.steps - len(seen)))[0]
            print(f"step {len(seen)}: {seen[-1][0]:.2f} s, {format_mb(seen[-1][1])} held", flush=True)
        (peak,) = team.ask("peak")
    seconds, held = (list(column) for column in zip(*seen[FIRST:], strict=True))
    values = {
        **facts,
        "base_bytes": base,
        "peak_bytes": peak,
        "cap_bytes": cap,
        "by_kernel": capped is not None,
        "beyond_plan": peak / allowed - 1,
        "growth_bytes": growth_per_step(held),
        "held_bytes": held,
    }
    checked = f"losses are finite in {len(seen)} steps"
    parameters = {**asdict(sizes), "plan": options.plan, "threads": options.threads, "times": TIMES}
    title = f"memory of a process with states on a disk, {options.precision}"
    return Result(NAME, title, OWN, checked, parameters, "rounds", {OWN: seconds}, {OWN: 1}, {OWN: None}, {OWN: values})


def format_mb(nbytes: float) -> str:
    return f"{nbytes / 1e6:.0f} MB"


def report_goals(result: Result) -> None:
    """Report whether the goals are met.

    Raises:
        BenchmarkError: one is not.
    """
    values = result.values[OWN]
    beyond, grows = values["beyond_plan"], values["growth_bytes"]
    held = "the kernel's" if values["by_kernel"] else "nobody's: no control group could be made"
    print(f"at the most {format_mb(values['peak_bytes'])}; cap {format_mb(values['cap_bytes'])}, {held}")
    print(f"beyond base and plan: {beyond:+.3f}, goal {BEYOND}; growth {grows:+.0f} bytes a step, goal {PAGE}")
    if beyond > BEYOND or grows > PAGE:
        raise BenchmarkError(
            "memory of a process with states on a disk",
            expected=f"{BEYOND} beyond the plan at the most, {PAGE} bytes a step",
            got=f"{beyond:+.3f} and {grows:+.0f}",
            do="See which of the record's steps took more.",
        )


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, required=True, help="on the disk to use")
    parser.add_argument("--out", type=Path, help="write the record there (JSON)")
    parser.add_argument("--plan", default="infinity-states", help="a preset with states on NVMe (infinity-states)")
    parser.add_argument("--steps", type=int, default=200, help=f"after the first {FIRST}; {2 * A_LINE} at least")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)), help="of the process")
    GPTWorkload.add_options(parser)
    parser.set_defaults(dim=384, layers=80, heads=6, sequence=8, batch=1, precision="fp32")
    options = parser.parse_args(arguments)
    if options.steps < 2 * A_LINE:
        parser.error(f"--steps {options.steps}: growth takes {2 * A_LINE} at least")
    record = Record.begin(NAME, format_command(), machine_fingerprint())
    record.results.append(measure_high_water(options))
    if options.out is not None:
        record.write(options.out)
    report_goals(record.results[0])


if __name__ == "__main__":
    main()
