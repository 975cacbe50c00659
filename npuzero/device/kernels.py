"""Locate the library of npu kernels and its sources.

CANN builds it, separately from the extension: in ``npuzero build-npu``, which caches one library per CANN release,
architecture and source text, or at installation if CANN is found.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

from npuzero import cann
from npuzero.cann import ARCHITECTURE, LIBRARY
from npuzero.config import Toolkit, cache_folder, find_toolkit, read_environment
from npuzero.errors import ConfigError

_PACKAGE = Path(__file__).resolve().parents[1]
#: The path of the library if the installation built it.
INSTALLED = _PACKAGE / "kernels" / LIBRARY


def kernel_sources() -> Path:
    """Return the folder of the kernels and their CMakeLists.txt: in the installed package, else next to it."""
    inside = _PACKAGE / "csrc" / "npu"
    return inside if inside.is_dir() else _PACKAGE.parent / "csrc" / "npu"


def cached_library_path(toolkit: Toolkit, architecture: str = ARCHITECTURE) -> Path:
    """Return the path where ``npuzero build-npu`` stores the library of these sources."""
    digest = hashlib.sha256()
    for path in sorted(kernel_sources().glob("*")):
        if path.is_file():
            digest.update(path.name.encode() + b"\0" + path.read_bytes())
    name = f"cann-{toolkit.version or 'unknown'}-{architecture}-{digest.hexdigest()[:12]}"
    return cache_folder() / "npu" / name / LIBRARY


def find_library() -> Path | None:
    """Return the library to use, or None: NPUZERO_NPU_KERNELS, else the cached one for this CANN, else the installed.

    Raises:
        ConfigError: NPUZERO_NPU_KERNELS names no file.
    """
    named = read_environment().npu_kernels
    if named:
        if not Path(named).is_file():
            raise ConfigError(
                "NPUZERO_NPU_KERNELS", expected=f"a {LIBRARY}", got=f"no file {named}", do="Run npuzero build-npu."
            )
        return Path(named)
    return next((path for path in _library_paths() if path.is_file()), None)


def why_no_library() -> str | None:
    """Return the full error output of the last failed build of the library; None if no build failed."""
    reasons = (cann.get_failure_file(path) for path in _library_paths())
    return next((path.read_text(encoding="utf-8").strip() for path in reasons if path.is_file()), None)


def _library_paths() -> list[Path]:
    toolkit = find_toolkit("cann")
    return [INSTALLED] if toolkit is None else [cached_library_path(toolkit), INSTALLED]
