"""A mutant: the package with one mistake in it, run under the tests that must notice.

The mistake is made in a copy of the package, of links but for the one file; the tests run in a process of their own
that finds the copy first, and so do the processes that they start.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]

#: Tests that take longer, because a rank waits for ever, have noticed too: alone they take a few seconds.
LIMIT_S = 60.0

_PASSED, _FAILED = 0, 1  # as pytest ends; what is more than 1 is no verdict


@dataclass(frozen=True)
class PackageMutant:
    """A mistake in the package, and who must notice.

    Attributes:
        breaks: what a user would see, in one line.
        file: within ``npuzero/``.
        old, new: ``old`` occurs once in the file, and becomes ``new``.
        tests: of pytest, below ``tests/``: files, functions or cases, as narrow as kills it.
        slow: no test of ``make test`` notices, one of ``make test-all`` does.
    """

    breaks: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]
    slow: bool = False

    @property
    def source(self) -> Path:
        return ROOT / "npuzero" / self.file


def kill_mutant(mutant: PackageMutant) -> bool:
    """Whether its tests notice."""
    text = mutant.source.read_text()
    assert text.count(mutant.old) == 1, f"{mutant.file} has {text.count(mutant.old)} of: {mutant.old}"
    with _copy_package() as folder:
        changed = folder / "npuzero" / mutant.file
        changed.unlink()
        for compiled in (changed.parent / "__pycache__").glob(f"{changed.stem}.*"):
            compiled.unlink()
        changed.write_text(text.replace(mutant.old, mutant.new))
        return not tests_pass(mutant.tests, folder, slow=mutant.slow)


def tests_pass(tests: Iterable[str], folder: Path, *, slow: bool, limit_s: float = LIMIT_S) -> bool:
    """Whether all ``tests`` pass for the package in ``folder``.

    Raises:
        RuntimeError: pytest could not run them.
    """
    chosen = [str(ROOT / "tests" / test) for test in tests]
    options = ["-c", str(ROOT / "pyproject.toml"), "-x", "-q", "-p", "no:cacheprovider"]
    # In the folder, which Python then looks into first; what the tests start looks into it by its environment.
    process = subprocess.Popen(
        [sys.executable, "-m", "pytest", *options, *([] if slow else ["-m", "not slow"]), *chosen],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(folder)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        said, _ = process.communicate(timeout=limit_s)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)  # with whatever it has started
        process.communicate()  # which closes the pipe
        return False
    if process.returncode > _FAILED:
        raise RuntimeError(f"{' '.join(tests)}: pytest ended with {process.returncode}\n{said[-3000:]}")
    return process.returncode == _PASSED  # a signal has killed it, too


@contextmanager
def _copy_package() -> Iterator[Path]:
    """A folder with a copy of the package, that is gone afterwards."""
    with tempfile.TemporaryDirectory(prefix="npuzero-mutant-") as name:
        shutil.copytree(ROOT / "npuzero", Path(name) / "npuzero", copy_function=os.symlink)
        yield Path(name)
