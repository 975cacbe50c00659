"""The library of npu kernels: its sources, and the places where a built one is looked for.

It is built by CANN, apart from the extension: by ``npuzero build-npu``, which keeps one for each release of CANN,
architecture and text of the sources, or at installation where CANN is found.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

from npuzero import cann
from npuzero.cann import ARCHITECTURE, LIBRARY
from npuzero.config import Toolkit, cache_folder, find_toolkit, read_environment
from npuzero.errors import ConfigError

_PACKAGE = Path(__file__).resolve().parents[1]
#: Where an installation that finds CANN leaves the library.
INSTALLED = _PACKAGE / "kernels" / LIBRARY


def kernel_sources() -> Path:
    """Return the folder with the kernels and their CMakeLists.txt: in the package where installed, else beside it."""
    inside = _PACKAGE / "csrc" / "npu"
    return inside if inside.is_dir() else _PACKAGE.parent / "csrc" / "npu"


def cached_library_path(toolkit: Toolkit, architecture: str = ARCHITECTURE) -> Path:
    """Return the path where ``npuzero build-npu`` leaves the library of these sources."""
    digest = hashlib.sha256()
    for path in sorted(kernel_sources().glob("*")):
        if path.is_file():
            digest.update(path.name.encode() + b"\0" + path.read_bytes())
    name = f"cann-{toolkit.version or 'unknown'}-{architecture}-{digest.hexdigest()[:12]}"
    return cache_folder() / "npu" / name / LIBRARY


def find_library() -> Path | None:
    """Return the library to use, if any: NPUZERO_NPU_KERNELS, else the one built for this CANN, else the installed one.

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
    """Return why the last attempt to build the library failed, to the compiler's last word; None if none failed."""
    reasons = (cann.get_failure_file(path) for path in _library_paths())
    return next((path.read_text(encoding="utf-8").strip() for path in reasons if path.is_file()), None)


def _library_paths() -> list[Path]:
    toolkit = find_toolkit("cann")
    return [INSTALLED] if toolkit is None else [cached_library_path(toolkit), INSTALLED]
