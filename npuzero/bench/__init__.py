"""Benchmarks: contenders measured in interleaved rounds, after their results are checked, into comparable records.

A suite (``suites/``) builds a ``Benchmark`` of contenders. ``run_benchmark`` checks and times it, on one process or on
the ranks of a ``Team``, and returns a ``Result``. A ``Record`` collects the results of a run and writes them as JSON.
``checks/`` compares an installation with references instead.

Read first: ``harness.py`` (rounds), ``team.py`` (ranks in processes), ``record.py`` (the JSON file). How to read the
figures, and how to add a benchmark: docs/benchmarks.md.
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
