"""The programs of documents, run as they stand there."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
#: The end of others' programs, without the interpreter's finalizing. A thread of gloo's (torch 2.13) may still hold
#: tensors of a collective just done, whether its group was destroyed or not; where it drops them while the interpreter
#: is finalizing, std::terminate ends the process. What trains by npuzero, whose end waits, needs no such line.
AT_ONCE = "\nimport os, sys\nsys.stdout.flush()\nos._exit(0)\n"


def find_page_programs(page: str) -> list[str]:
    """The Python programs of `docs/<page>`, in order."""
    text = (ROOT / "docs" / page).read_text(encoding="utf-8")
    return re.findall(r"^```python\n(.*?)^```", text, re.DOTALL | re.MULTILINE)


def run_program_text(program: str, ranks: int, folder: Path) -> str:
    """Run a program's text in `folder`, as :func:`run_script` does."""
    (folder / "program.py").write_text(program)
    return run_script(folder / "program.py", ranks, folder)


def run_script(script: Path, ranks: int, folder: Path, *arguments: str) -> str:
    """What it prints, run in `folder` by python or, on several ranks, by torchrun; fails where it does."""
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"] if ranks > 1 else []
    ended = subprocess.run(
        [sys.executable, *launcher, str(script), *arguments],
        cwd=folder,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
        timeout=500,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    assert ended.returncode == 0, ended.stdout[-6000:]
    return ended.stdout
