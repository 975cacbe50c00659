"""What goes to others: the source distribution has all that a wheel is made of, and the wheel all that a user needs."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tarfile
import zipfile
from email import message_from_bytes
from pathlib import Path

import pytest

import npuzero
from packages import ROOT, copy_project

PROGRAM = """
import os, npuzero
assert os.path.dirname(npuzero.__file__) == os.path.join(os.getcwd(), "npuzero"), npuzero.__file__
assert npuzero.info()["kernels"]["flat_adam"]["cpu"]
"""


def run_packaging(folder: Path, *command: str | Path) -> None:
    done = subprocess.run(
        [sys.executable, *command], cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=500
    )
    assert done.returncode == 0, done.stdout


def make_wheel(sources: Path, folder: Path) -> Path:
    """The wheel that pip makes of a source distribution."""
    flags = ("--quiet", "--no-deps", "--no-build-isolation", "--disable-pip-version-check")
    run_packaging(folder, "-m", "pip", "wheel", *flags, "--wheel-dir", folder / "wheel", sources)
    (wheel,) = (folder / "wheel").glob("npuzero-*.whl")
    return wheel


def list_relative_files(folder: Path) -> set[str]:
    """Those under a folder, relative to it."""
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return copy_project(tmp_path_factory.mktemp("packages") / "project")


@pytest.fixture(scope="module")
def sources(project: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A source distribution, of a copy: making one leaves files in the tree."""
    copy = project.with_name("made")
    shutil.copytree(project, copy)
    run_packaging(copy, "setup.py", "-q", "sdist")
    (made,) = (copy / "dist").glob("*.tar.gz")
    return made


@pytest.fixture(scope="module")
def wheel(sources: Path) -> Path:
    """A wheel from the source distribution alone."""
    folder = sources.parents[2] / "elsewhere"
    folder.mkdir()
    return make_wheel(sources, folder)


def test_the_source_distribution_has_every_file_that_an_installation_reads(project: Path, sources: Path) -> None:
    with tarfile.open(sources) as archive:
        there = {name.partition("/")[2] for name in archive.getnames()}
    assert {
        "npuzero/planner/hardware/clusters/910b-64g.json",
        "csrc/core/view.h",
        "csrc/npu/cast.cpp",
    } <= list_relative_files(project)
    assert list_relative_files(project) - there == set()


def test_a_wheel_from_it_has_every_file_of_the_package(project: Path, wheel: Path) -> None:
    package = {f"npuzero/{name}" for name in list_relative_files(project / "npuzero")}
    kernels = {
        f"npuzero/csrc/npu/{name}"
        for name in list_relative_files(project / "csrc" / "npu")
        if not name.startswith("host/")
    }
    made = {name for name in zipfile.ZipFile(wheel).namelist() if name.startswith("npuzero/") and name[-1] != "/"}
    assert made - {"npuzero/_C.so"} == package | kernels


def test_the_version_is_the_modules(sources: Path, wheel: Path) -> None:
    assert sources.name == f"npuzero-{npuzero.__version__}.tar.gz"
    with zipfile.ZipFile(wheel) as archive:
        (name,) = [name for name in archive.namelist() if name.endswith(".dist-info/METADATA")]
        said = message_from_bytes(archive.read(name))
    assert said["Version"] == npuzero.__version__ and said["License-Expression"] == "Apache-2.0"
    assert {"torch>=2.8", "numpy"} <= set(said.get_all("Requires-Dist") or ())


@pytest.mark.slow
def test_the_real_extension_is_built_from_the_source_distribution(tmp_path: Path) -> None:
    project = copy_project(tmp_path / "project")
    shutil.copy(ROOT / "csrc" / "CMakeLists.txt", project / "csrc")
    run_packaging(project, "setup.py", "-q", "sdist")
    (sources,) = (project / "dist").glob("*.tar.gz")
    zipfile.ZipFile(make_wheel(sources, tmp_path)).extractall(tmp_path / "site")
    run_packaging(tmp_path / "site", "-c", PROGRAM)
