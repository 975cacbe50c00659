"""The library of npu kernels: what it is built of, where it is looked for.

It is built by CANN, apart from the extension: at installation where CANN is found, or by ``npuzero build-npu``, which
keeps one for each release of CANN, architecture and text of the sources.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

from npuzero.config import Toolkit, cache_folder, environment, find_toolkit
from npuzero.errors import ConfigError

#: bisheng's name of Atlas A2 and A3, the architecture that the kernels are written for.
ARCHITECTURE = "dav-2201"
LIBRARY = "libnpuzero_kernels.so"

_PACKAGE = Path(__file__).resolve().parents[1]
#: Where an installation that finds CANN leaves the library.
INSTALLED = _PACKAGE / "kernels" / LIBRARY


def sources() -> Path:
    """The folder with the kernels and their CMakeLists.txt: in the package where installed, else beside it."""
    inside = _PACKAGE / "csrc" / "npu"
    return inside if inside.is_dir() else _PACKAGE.parent / "csrc" / "npu"


def cached(toolkit: Toolkit, architecture: str = ARCHITECTURE) -> Path:
    """Where ``npuzero build-npu`` leaves the library of these sources."""
    digest = hashlib.sha256()
    for path in sorted(sources().glob("*")):
        if path.is_file():
            digest.update(path.name.encode() + b"\0" + path.read_bytes())
    name = f"cann-{toolkit.version or 'unknown'}-{architecture}-{digest.hexdigest()[:12]}"
    return cache_folder() / "npu" / name / LIBRARY


def find() -> Path | None:
    """The library to use, or None: NPUZERO_NPU_KERNELS, else the installation's, else the cached one.

    Raises:
        ConfigError: NPUZERO_NPU_KERNELS names no file.
    """
    named = environment().npu_kernels
    if named:
        if not Path(named).is_file():
            raise ConfigError(
                "NPUZERO_NPU_KERNELS", expected=f"a {LIBRARY}", got=f"no file {named}", do="Run npuzero build-npu."
            )
        return Path(named)
    toolkit = find_toolkit("cann")
    places = [INSTALLED] if toolkit is None else [INSTALLED, cached(toolkit)]
    return next((path for path in places if path.is_file()), None)
