"""The programs of docs/frameworks.md, as they stand there: by one process and by torchrun."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

PAGE = Path(__file__).resolve().parents[2] / "docs/frameworks.md"
PROGRAMS = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)
NEEDS = ("accelerate", "transformers", "lightning")


@pytest.mark.slow
@pytest.mark.world
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("framework", NEEDS)
def test_the_program_runs(framework: str, ranks: int, tmp_path: Path) -> None:
    if find_spec(framework) is None:
        pytest.skip(f"{framework} is not installed")
    program = tmp_path / "program.py"
    program.write_text(next(text for text in PROGRAMS if f"import {framework}" in text or f"from {framework} " in text))
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"] if ranks > 1 else []
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(PAGE.parents[1])}
    ended = subprocess.run(
        [sys.executable, *launcher, program.name],
        cwd=tmp_path,
        env=environment,
        timeout=300,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    assert ended.returncode == 0, ended.stdout[-4000:]
    assert ended.stdout.count("loss") >= ranks
    assert (tmp_path / "weights" / "model.safetensors").is_file()
