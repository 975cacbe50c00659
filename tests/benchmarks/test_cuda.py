"""The program that holds ops on a GPU against their goals, tried on the CPU."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from benchmarks.cuda.__main__ import BENCHMARKS, GOALS
from npuzero.bench import Record

ROOT = Path(__file__).resolve().parents[2]


def run_cuda_benchmark(*words: str, **variables: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(words, env=os.environ | variables, cwd=ROOT, capture_output=True, text=True)


def test_every_benchmark_checks_its_results_and_every_goal_is_answered(tmp_path: Path) -> None:
    out = tmp_path / "ops.json"
    sizes = ("--elements", "900000", "--seconds", "0.01")
    made = run_cuda_benchmark(sys.executable, "-m", "benchmarks.cuda", "--device", "cpu", *sizes, "--out", str(out))
    assert made.returncode == 0, made.stderr
    record = Record.read(out)
    assert [result.name for result in record.results] == list(BENCHMARKS)
    assert all(goal.reached(record.result(goal.benchmark)) > 0 for goal in GOALS)


def test_the_script_says_what_its_parts_are() -> None:
    script = ROOT / "benchmarks" / "cuda" / "judge.sh"
    assert os.access(script, os.X_OK)
    made = run_cuda_benchmark(str(script), PARTS="measures")
    assert made.returncode == 2 and "expected build, check, measure, step" in made.stderr
