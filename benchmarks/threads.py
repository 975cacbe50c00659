"""CPU time of a step's threads, compared with compute only. From the repository's root::

    python -m benchmarks.threads --out benchmarks/results/threads/VENDOR.json     # needs transformers

A Llama of transformers (19 M parameters in 10 layers, bf16, batch 4 x 160) on 2 ranks, each a process with one compute
thread. On two cores compute waits for all work of a collective's thread. Step times need an idle machine; counts do
not: each contender's ranks also count CPU time and context switches by thread, and page faults. ``loop`` is the compute
thread, ``npuzero-comm`` are the collectives' threads, all other threads have their own names.

The instruction sets that oneDNN may use determine compute time: ``ONEDNN_MAX_CPU_ISA=AVX512_CORE_BF16`` excludes AMX,
and is in the record.

Counts are per step, averaged over ranks. A voluntary switch is a thread going to sleep, an involuntary one the loss of
its core to another thread. CPU time of a spinning thread is wasted.
"""

from __future__ import annotations

import argparse
import os
import statistics
import threading
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.step.memory import page_faults
from benchmarks.step.work import StepRank
from benchmarks.step.workload import GPTWorkload
from npuzero.bench import (
    Benchmark,
    Effort,
    Record,
    Result,
    Team,
    check_equal,
    format_command,
    machine_fingerprint,
    python_worker,
    run_benchmark,
)

ROOT = Path(__file__).resolve().parents[1]
BASELINE = "compute only"
CONTENDERS = {BASELINE: "compute", "npuzero zero2": "zero2", "npuzero zero3": "zero3"}

#: Counters of a thread, and their lines in /proc/self/task/*/status.
SWITCHES = {"sleeps": "voluntary_ctxt_switches:", "put aside": "nonvoluntary_ctxt_switches:"}


@dataclass(frozen=True)
class LlamaWorkload(GPTWorkload):
    """A transformers Llama in place of the plain GPT."""

    dim: int = 384
    layers: int = 10
    heads: int = 6
    vocabulary: int = 2048
    sequence: int = 160

    def model(self) -> nn.Module:  # type: ignore[override]
        torch.manual_seed(0)
        return LlamaWithLogits(self)


class LlamaWithLogits(nn.Module):
    """int64[B, T] -> logits f32[B, T, V]."""

    def __init__(self, sizes: GPTWorkload) -> None:
        from transformers import LlamaConfig, LlamaForCausalLM

        super().__init__()
        config = LlamaConfig(
            vocab_size=sizes.vocabulary,
            hidden_size=sizes.dim,
            intermediate_size=sizes.dim * 8 // 3,
            num_hidden_layers=sizes.layers,
            num_attention_heads=sizes.heads,
            max_position_embeddings=sizes.sequence,
            use_cache=False,
        )
        self.model = LlamaForCausalLM(config)

    def forward(self, tokens: Tensor) -> Tensor:
        logits: Tensor = self.model(tokens).logits
        return logits.float()


def make(rank: int, size: int, options: dict[str, Any]) -> CountedRank:
    """Make one rank for npuzero.bench's worker; see benchmarks.step.work for the options."""
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    return CountedRank(rank, options, LlamaWorkload)


class CountedRank(StepRank):
    """Take steps, and count the work of its threads."""

    def count(self, steps: int) -> dict[str, float]:
        """Return per step: CPU seconds and switches by kind of thread, and page faults."""
        before = thread_counts()
        for _ in range(steps):
            self.run()
        after = thread_counts()
        return {key: (after[key] - before[key]) / steps for key in sorted(after)}


def thread_counts() -> Counter[str]:
    """Return the counters of this process's threads since their start, as "<counter> of <thread>"."""
    python = {thread.native_id: thread.name for thread in threading.enumerate()}
    found: Counter[str] = Counter({"page faults": page_faults()})
    for task in Path("/proc/self/task").iterdir():
        thread = int(task.name)
        name = python.get(thread) or (task / "comm").read_text().strip()
        name = "loop" if thread == os.getpid() else name
        # The clock id of a thread, as clock_getcpuclockid(3) derives it; schedstat has the same value if the kernel has
        # it.
        found[f"cpu_s of {name}"] += time.clock_gettime((~thread << 3) | 6)  # type: ignore[assignment]
        lines = dict(line.split()[:2] for line in (task / "status").read_text().splitlines() if "ctxt" in line)
        for what, line in SWITCHES.items():
            found[f"{what} of {name}"] += int(lines[line])
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    LlamaWorkload.add_options(parser)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=15, help="at the most")
    parser.add_argument("--seconds", type=float, default=300.0, help="of rounds, at the most")
    parser.add_argument("--counted", type=int, default=20, help="steps that are counted")
    parser.add_argument("--out", type=Path, help="write the record there (JSON)")
    options = parser.parse_args()
    record = Record.begin("threads", format_command(), machine_fingerprint())
    record.results.append(measure_threads(options))
    print(threads_table(record.results[0]))
    if options.out is not None:
        record.write(options.out)


def measure_threads(options: argparse.Namespace) -> Result:
    """Time all contenders in rounds, then count each."""
    workload = LlamaWorkload.of(options)
    with ExitStack() as stack:
        teams = {name: stack.enter_context(thread_team(name, workload, options.ranks)) for name in CONTENDERS}

        def check() -> str:
            """Check that both presets learn the same: sharding does not change a bit."""
            two, three = (teams[name].ask("train", steps=3) for name in CONTENDERS if name != BASELINE)
            check_equal("zero3", torch.tensor(three), torch.tensor(two))
            return "losses of 3 steps under zero2 and zero3, to the bit"

        contenders = [of.contender() for of in teams.values()]
        effort = Effort(min(5, options.rounds), options.rounds, options.seconds, visit_s=0.5, warm_up=1)
        facts = asdict(workload) | {"ranks": options.ranks, "threads": 1, "counted": options.counted}
        facts["onednn_max_cpu_isa"] = os.environ.get("ONEDNN_MAX_CPU_ISA", "all")
        title = f"transformers Llama, {workload.precision}, batch {workload.batch} x {workload.sequence} a rank"
        result = run_benchmark(Benchmark("threads/llama", title, contenders, BASELINE, check, facts), effort)
        for name, of in teams.items():
            result.values[name] = mean_counts(of.ask("count", steps=options.counted))
    return result


def thread_team(name: str, workload: GPTWorkload, ranks: int) -> Team:
    """Return the ranks of a contender, with one thread each."""
    contender = f"benchmarks.step.contenders:{CONTENDERS[name]}"
    return Team(
        name,
        python_worker("benchmarks.threads"),
        ranks,
        options={"contender": contender, "batches": [[rank] for rank in range(ranks)], "workload": asdict(workload)},
        variables={"PYTHONPATH": os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))},
        start_s=600.0,
    )


def mean_counts(counted: Sequence[dict[str, float]]) -> dict[str, float]:
    """Return the mean of the counts over all ranks."""
    keys = sorted({key for one in counted for key in one})
    return {key: statistics.fmean(one.get(key, 0.0) for one in counted) for key in keys}


def threads_table(result: Result) -> str:
    """Return the counts as a table, for people."""
    lines = [f"{result.title}; {len(result.seconds[BASELINE])} rounds; per step and rank"]
    for name in result.seconds:
        time, values = result.slowdown(name), result.values[name]
        lines.append(
            f"{name:16} {time.median:6.3f} (MAD {time.mad:.3f}) x compute only; {values['page faults']:.0f} page faults"
        )
        for thread in sorted({key.partition(" of ")[2] for key in values if " of " in key}):
            cpu_s, *switches = (values.get(f"{what} of {thread}", 0.0) for what in ("cpu_s", *SWITCHES))
            told = f"sleeps {switches[0]:7.1f}, is put aside {switches[1]:6.1f} times"
            lines.append(f"    {thread:28} {cpu_s * 1e3:9.2f} ms of CPU; {told}")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
