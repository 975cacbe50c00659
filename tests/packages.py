"""Copy the project as an installation reads it, without the minute that compiling its extension module takes."""

from __future__ import annotations

import shutil
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent

_STUB = """
cmake_minimum_required(VERSION 3.24)
project(stub NONE)
file(WRITE "${NPUZERO_OUTPUT}/_C.so" "")
"""

_UNNEEDED = shutil.ignore_patterns("*.so", "__pycache__", "kernels")


def copy_project(folder: Path) -> Path:
    """Make ``folder`` a copy of the files an installation reads; its extension module is an empty file."""
    for name in ("npuzero", "csrc"):
        shutil.copytree(ROOT / name, folder / name, ignore=_UNNEEDED)
    for name in ("setup.py", "pyproject.toml", "MANIFEST.in", "README.md", "CHANGELOG.md", "LICENSE"):
        shutil.copy(ROOT / name, folder / name)
    (folder / "csrc" / "CMakeLists.txt").write_text(_STUB)
    return folder
