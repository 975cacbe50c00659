"""The training step, against compute only. From the repository's root:

    python -m benchmarks.step --presets zero2,zero3                    # about 60 s; batch 4, bf16, 2 ranks x 1 thread
    python -m benchmarks.step --presets zero2,zero3 --batch 1 --rounds 20
    python -m benchmarks.step --presets zero2 --trace build/step.json  # a Chrome trace of two steps of every rank

A line per round with each contender's step time over that of compute only in the same round; then the table.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

from benchmarks.step.workload import Workload

ROOT = Path(__file__).resolve().parents[2]


class Team:
    """The ranks of one contender, alive between orders."""

    def __init__(
        self,
        name: str,
        contender: str,
        workload: Workload,
        ranks: int,
        *,
        threads: int = 1,
        batches: list[str] | None = None,
        python: str = sys.executable,
    ) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        self.name = name
        self._ranks = []
        for rank in range(ranks):
            env = os.environ | {
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
                "WORLD_SIZE": str(ranks),
                "LOCAL_WORLD_SIZE": str(ranks),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(port),
                "OMP_NUM_THREADS": str(threads),
            }
            command = [
                python,
                "-m",
                "benchmarks.step.rank",
                f"--contender={contender}",
                f"--batches={batches[rank] if batches else rank}",
                *workload.arguments(),
            ]
            self._ranks.append(
                subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=env, cwd=ROOT)
            )
        self.hello = self._answers()

    def ask(self, do: str, steps: int) -> list[dict[str, Any]]:
        for rank in self._ranks:
            rank.stdin.write(json.dumps({"do": do, "steps": steps}) + "\n")
            rank.stdin.flush()
        return self._answers()

    def _answers(self) -> list[dict[str, Any]]:
        lines = [rank.stdout.readline() for rank in self._ranks]
        if not all(lines):
            raise RuntimeError(f"{self.name}: a rank has ended; see its output above")
        return [json.loads(line) for line in lines]

    def close(self) -> None:
        for rank in self._ranks:
            rank.stdin.close()
        for rank in self._ranks:
            rank.wait(30)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--presets", default="zero2,zero3")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--visit", type=int, default=2, help="steps timed per contender and round, after one that is not"
    )
    parser.add_argument("--checked", type=int, default=2, help="steps whose losses are compared with plain torch's")
    parser.add_argument("--trace", type=Path, help="write a Chrome trace of two steps of the last preset")
    Workload.add_options(parser)
    options = parser.parse_args()
    workload = Workload.of(options)
    presets = options.presets.split(",")
    here = "benchmarks.step.contenders:"
    reference = Team(
        "reference",
        here + "alone",
        workload,
        1,
        threads=options.ranks,
        batches=[",".join(map(str, range(options.ranks)))],
    )
    expected = reference.ask("train", options.checked)[0]["losses"]
    reference.close()
    teams = {name: Team(name, here + name, workload, options.ranks) for name in ("compute", *presets)}
    for name, team in teams.items():
        answers = team.ask("train", options.checked)
        losses = [statistics.fmean(step) for step in zip(*(answer["losses"] for answer in answers), strict=True)]
        if name != "compute":
            print(f"{name:12} losses {[round(x, 4) for x in losses]} reference {[round(x, 4) for x in expected]}")
    seconds: dict[str, list[float]] = {name: [] for name in teams}
    for number in range(options.rounds):
        order = list(teams)
        for name in order[number % len(order) :] + order[: number % len(order)]:
            answers = teams[name].ask("time", options.visit)
            seconds[name].append(max(answer["seconds"] for answer in answers))
        base = seconds["compute"][-1]
        print(
            f"compute {base * 1e3:7.1f} ms  " + "  ".join(f"{p} {seconds[p][-1] / base:.3f}" for p in presets),
            flush=True,
        )
    looks = {name: team.ask("look", 2) for name, team in teams.items()}
    tokens = options.ranks * workload.batch * workload.sequence
    print("rank 0: ms of a step's parts, peak MB beyond the process's own, planned MB, page faults, ms of spans")
    for name, team in teams.items():
        ratios = [one / other for one, other in zip(seconds[name], seconds["compute"], strict=True)]
        middle = statistics.median(ratios)
        mad = statistics.median(abs(r - middle) for r in ratios)
        look = looks[name][0]
        parts = "".join(f"{part} {s * 1e3:.1f}  " for part, s in look["parts"].items())
        spans = "".join(f"{span} {s * 1e3:.1f}  " for span, s in look["spans"].items())
        peak = max(a["peak_bytes"] - h["base_bytes"] for a, h in zip(looks[name], team.hello, strict=True)) / 1e6
        plan = team.hello[0]["facts"].get("plan_bytes", 0) / 1e6
        print(f"{name:12} {middle:.3f} ± {mad:.3f} {tokens / statistics.median(seconds[name]):8.0f} tokens/s  {parts}")
        print(f"{'':12} peak {peak:.1f}  plan {plan:.1f}  faults {look['page_faults']:.0f}  {spans}")
    if options.trace:
        write_trace(options.trace, teams[presets[-1]].ask("trace", 2))
    for team in teams.values():
        team.close()


def write_trace(path: Path, answers: list[dict[str, Any]]) -> None:
    from npuzero.observe import ChromeTrace, Count, Instant, Span, emit, recording

    path.parent.mkdir(parents=True, exist_ok=True)
    with recording(ChromeTrace(path)):
        for answer in answers:
            for event in answer["events"]:
                kind = Span if "begin_s" in event else Count if "value" in event else Instant
                emit(kind(**event))


if __name__ == "__main__":
    main()
