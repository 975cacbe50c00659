"""Measuring: contenders interleaved in rounds, results checked before they are timed, records that can be compared.

How to read the figures, and how to add one: docs/benchmarks.md.
"""

from __future__ import annotations

from npuzero.bench.harness import (
    Benchmark,
    Contender,
    Effort,
    Result,
    check_close,
    check_equal,
    local_contender,
    run_benchmark,
)
from npuzero.bench.machine import machine_fingerprint
from npuzero.bench.record import SCHEMA, Record, format_command
from npuzero.bench.spread import Summary, median, per_round, summarize
from npuzero.bench.team import Team, python_worker

__all__ = [
    "SCHEMA",
    "Benchmark",
    "Contender",
    "Effort",
    "Record",
    "Result",
    "Summary",
    "Team",
    "check_close",
    "check_equal",
    "format_command",
    "local_contender",
    "machine_fingerprint",
    "median",
    "per_round",
    "python_worker",
    "run_benchmark",
    "summarize",
]
