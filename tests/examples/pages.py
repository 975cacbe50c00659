"""The programs of documents, run as they stand there."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def programs(page: str) -> list[str]:
    """The Python programs of `docs/<page>`, in order."""
    text = (ROOT / "docs" / page).read_text(encoding="utf-8")
    return re.findall(r"^```python\n(.*?)^```", text, re.DOTALL | re.MULTILINE)


def run(program: str, ranks: int, folder: Path) -> str:
    """What it prints, run in `folder` by python or, on several ranks, by torchrun; fails where it does."""
    (folder / "program.py").write_text(program)
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"] if ranks > 1 else []
    ended = subprocess.run(
        [sys.executable, *launcher, "program.py"],
        cwd=folder,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
        timeout=300,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    assert ended.returncode == 0, ended.stdout[-4000:]
    return ended.stdout
