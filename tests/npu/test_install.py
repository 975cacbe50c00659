"""Installation compiles the npu kernels where CANN is found: setup.py as it is, with a CANN for the emulator."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
import sysconfig
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

from npu.fake import libraries
from packages import copy_project

NAMES = ("cast", "dequantize_sum", "flat_adam", "flat_lion", "norm", "norm_finish", "pack", "quantize")


@pytest.fixture
def project(tmp_path: Path) -> Path:
    return copy_project(tmp_path / "project")


def install_with_cann(project: Path, home: Path | str, *command: str) -> subprocess.CompletedProcess[str]:
    """`python setup.py build`, or another command, with CANN said to be at `home`."""
    environment = os.environ | {"ASCEND_HOME_PATH": str(home)}
    line = [sys.executable, *(command or ("setup.py", "-q", "build"))]
    return subprocess.run(
        line, cwd=project, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=300
    )


@pytest.mark.slow
def test_a_wheel_has_the_kernels_and_their_sources(project: Path, tmp_path: Path) -> None:
    libraries.build_fake_cann()
    home = libraries.make_cann_folder(tmp_path / "Ascend" / "cann")
    out = tmp_path / "wheels"
    pip = ("-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "--wheel-dir", str(out), ".")
    done = install_with_cann(project, home, *pip)
    assert done.returncode == 0, done.stdout
    (wheel,) = out.glob("npuzero-*.whl")
    site = tmp_path / "site"
    zipfile.ZipFile(wheel).extractall(site)
    sources = {path.name for path in (site / "npuzero" / "csrc" / "npu").iterdir()}
    assert {"CMakeLists.txt", "codes.h", "flat_adam.cpp", "tiling.h"} <= sources and "host" not in sources
    library = ctypes.CDLL(str(site / "npuzero" / "kernels" / "libnpuzero_kernels.so"))
    assert not (site / "npuzero" / "kernels" / "libnpuzero_kernels.txt").exists()
    assert all(hasattr(library, f"aclrtlaunch_npuzero_{name}") for name in NAMES)


def test_without_cann_there_are_the_sources_alone(project: Path) -> None:
    done = install_with_cann(project, "")
    assert done.returncode == 0, done.stdout
    (package,) = project.glob("build/lib*/npuzero")
    assert (package / "csrc" / "npu" / "cast.cpp").is_file() and not (package / "kernels").exists()


def make_failing_cann(folder: Path) -> Path:
    """A CANN whose compiler fails."""
    compiler = folder / "bin" / "bisheng"
    compiler.parent.mkdir(parents=True)
    compiler.write_text("#!/bin/sh\necho error: the first >&2; exit 1\n")
    compiler.chmod(0o755)
    return folder


def make_old_cann(folder: Path) -> Path:
    return libraries.make_cann_folder(folder, "8.1.RC1", "latest")


def missing_cann(folder: Path) -> Path:
    return folder


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (make_failing_cann, "error: the first"),
        (make_old_cann, "need CANN 8.3.RC1 or later; found 8.1.RC1"),
        (missing_cann, "there is no CANN in"),
    ],
)
def test_where_kernels_cannot_be_built_it_installs_without_and_says_why(
    make: Callable[[Path], Path], why: str, project: Path, tmp_path: Path
) -> None:
    stale = project / "build" / f"lib.{sysconfig.get_platform()}-{sys.implementation.cache_tag}" / "npuzero" / "kernels"
    stale.mkdir(parents=True)
    (stale / "libnpuzero_kernels.so").touch()  # of an earlier build
    done = install_with_cann(project, make(tmp_path / "cann"))
    assert done.returncode == 0, done.stdout
    assert why in done.stdout and "`npuzero build-npu` compiles them later" in done.stdout
    (package,) = project.glob("build/lib*/npuzero")
    assert why in (package / "kernels" / "libnpuzero_kernels.txt").read_text()  # pip hides what is printed
    assert list(package.glob("_C*.so")) and not list(package.glob("kernels/*.so"))


@pytest.mark.slow
def test_pip_says_nothing_and_the_package_tells(project: Path, tmp_path: Path) -> None:
    out = tmp_path / "site"
    pip = ("-m", "pip", "install", "--quiet", "--no-deps", "--no-build-isolation", "--target", str(out), ".")
    done = install_with_cann(project, tmp_path / "none", *pip)
    assert done.returncode == 0, done.stdout
    assert "there is no CANN in" in (out / "npuzero" / "kernels" / "libnpuzero_kernels.txt").read_text()
