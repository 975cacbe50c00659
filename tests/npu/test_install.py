"""Installation compiles the npu kernels where CANN is found: setup.py as it is, with a CANN for the emulator.

The extension module, which has nothing to do with it and takes a minute, is left out of the copy that is installed.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from npu.fake import libraries

CANN = libraries.HERE / "cann"
NAMES = ("cast", "flat_adam", "norm", "norm_finish", "pack")


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A copy of what an installation reads."""
    folder = tmp_path / "project"
    unneeded = shutil.ignore_patterns("*.so", "__pycache__")
    for name in ("npuzero", "csrc/npu"):
        shutil.copytree(libraries.ROOT / name, folder / name, ignore=unneeded)
    for name in ("setup.py", "pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(libraries.ROOT / name, folder / name)
    stub = 'cmake_minimum_required(VERSION 3.24)\nproject(stub NONE)\nfile(WRITE "${NPUZERO_OUTPUT}/_C.so" "")\n'
    (folder / "csrc" / "CMakeLists.txt").write_text(stub)
    return folder


def install(project: Path, home: Path | str, *command: str) -> subprocess.CompletedProcess[str]:
    """`python setup.py build`, or another command, with CANN said to be at `home`."""
    environment = os.environ | {"ASCEND_HOME_PATH": str(home)}
    line = [sys.executable, *(command or ("setup.py", "-q", "build"))]
    return subprocess.run(
        line, cwd=project, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=200
    )


@pytest.mark.slow
def test_a_wheel_has_the_kernels_and_their_sources(project: Path, tmp_path: Path) -> None:
    libraries.build()
    out = tmp_path / "wheels"
    pip = ("-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "--wheel-dir", str(out), ".")
    done = install(project, CANN, *pip)
    assert done.returncode == 0, done.stdout
    (wheel,) = out.glob("npuzero-*.whl")
    site = tmp_path / "site"
    zipfile.ZipFile(wheel).extractall(site)
    sources = {path.name for path in (site / "npuzero" / "csrc" / "npu").iterdir()}
    assert {"CMakeLists.txt", "codes.h", "flat_adam.cpp", "tiling.h"} <= sources and "host" not in sources
    ctypes.CDLL(str(libraries.BUILT / "libascendcl.so"), mode=ctypes.RTLD_GLOBAL)
    library = ctypes.CDLL(str(site / "npuzero" / "kernels" / "libnpuzero_kernels.so"))
    assert all(hasattr(library, f"aclrtlaunch_npuzero_{name}") for name in NAMES)


def test_without_cann_there_are_the_sources_alone(project: Path) -> None:
    done = install(project, "")
    assert done.returncode == 0, done.stdout
    (package,) = project.glob("build/lib*/npuzero")
    assert (package / "csrc" / "npu" / "cast.cpp").is_file() and not (package / "kernels").exists()


def test_a_cann_that_is_not_there_is_named(project: Path, tmp_path: Path) -> None:
    done = install(project, tmp_path / "none")
    assert done.returncode != 0
    assert f"no CANN in ASCEND_HOME_PATH='{tmp_path / 'none'}'" in " ".join(done.stdout.split())  # cmake breaks lines
    assert "unset ASCEND_HOME_PATH to install without kernels for the NPU" in done.stdout


def test_a_compiler_that_fails_is_quoted(project: Path, tmp_path: Path) -> None:
    compiler = tmp_path / "cann" / "bin" / "bisheng"
    compiler.parent.mkdir(parents=True)
    compiler.write_text("#!/bin/sh\necho the first error >&2; exit 1\n")
    compiler.chmod(0o755)
    done = install(project, tmp_path / "cann")
    assert done.returncode != 0
    assert "the first error" in done.stdout
    assert "unset ASCEND_HOME_PATH to install without kernels for the NPU" in done.stdout
