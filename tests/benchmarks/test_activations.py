"""The benchmark of activations in a tiny size: it checks bits and bytes, and leaves a record."""

from __future__ import annotations

import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from npuzero.bench import Record


@pytest.mark.slow
def test_a_whole_run(tmp_path: Path) -> None:
    out = tmp_path / "activations.json"
    tiny = "--dim 128 --layers 3 --heads 2 --sequence 128 --batch 4 --seconds 1"
    command = [sys.executable, "-m", "benchmarks.activations", *shlex.split(tiny), "--out", str(out)]
    subprocess.run(command, check=True, timeout=300)
    result = Record.read(out).result("activations")
    assert set(result.seconds) == {"device", "host"}
