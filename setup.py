"""Builds the one extension module, npuzero._C, by CMake and Ninja. Everything else is in pyproject.toml.

    pip install .                            a wheel, in build isolation
    pip install -e . --no-build-isolation    for development
    python setup.py build_ext --inplace      rebuild after a change in csrc (compiles only what changed)

Environment: NPUZERO_BUILD_SANITIZE=1 builds with AddressSanitizer and UndefinedBehaviorSanitizer (how to run it is in
csrc/CMakeLists.txt); CMAKE_ARGS and CMAKE_BUILD_PARALLEL_LEVEL mean what they mean everywhere.
"""

from __future__ import annotations

import importlib.util
import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext
from setuptools.command.build_py import build_py

ROOT = Path(__file__).resolve().parent


def find_tool(name: str) -> str:
    """Path of a build tool: of this Python's environment if it has one, else of the system."""
    search = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    tool = shutil.which(name, path=search)
    if tool is None:
        raise SystemExit(f"npuzero: building needs {name}; `pip install {name}` and build again")
    return tool


def load_cann() -> ModuleType:
    """npuzero/cann.py by itself: importing npuzero needs torch, which an isolated build does not have."""
    spec = importlib.util.spec_from_file_location("npuzero_cann", ROOT / "npuzero" / "cann.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class CMakeBuild(build_ext):
    """Hands each extension to CMake, which leaves the module where setuptools expects it."""

    def run(self) -> None:
        self.develops = bool(self.inplace)  # setuptools hides `inplace` from build_extension
        super().run()

    def build_extension(self, ext: Extension) -> None:
        import pybind11

        target = Path(self.get_ext_fullpath(ext.name)).resolve()
        build = ROOT / "build" / "develop" if self.develops else Path(self.build_temp).resolve()
        sanitize = os.environ.get("NPUZERO_BUILD_SANITIZE", "0") not in ("", "0")
        cmake = find_tool("cmake")
        configure = [
            cmake,
            *([] if self.develops else ["--fresh"]),  # an isolated build's tools are gone at the next build
            *("-S", str(ROOT / "csrc"), "-B", str(build), "-G", "Ninja"),
            f"-DCMAKE_MAKE_PROGRAM={find_tool('ninja')}",
            f"-DCMAKE_BUILD_TYPE={'Debug' if sanitize else 'Release'}",
            f"-DNPUZERO_SANITIZE={'ON' if sanitize else 'OFF'}",
            f"-DNPUZERO_OUTPUT={target.parent}",
            f"-DPython_EXECUTABLE={sys.executable}",
            f"-Dpybind11_DIR={pybind11.get_cmake_dir()}",
            *shlex.split(os.environ.get("CMAKE_ARGS", "")),
        ]
        subprocess.run(configure, check=True)
        subprocess.run([cmake, "--build", str(build)], check=True)
        if home := os.environ.get("ASCEND_HOME_PATH"):
            self.build_npu_kernels(cmake, Path(home), target.parent / "kernels")

    def build_npu_kernels(self, cmake: str, home: Path, folder: Path) -> None:
        """A library of its own, by CANN's compiler. Where that cannot be, npuzero is installed without it."""
        cann = load_cann()
        library = folder / cann.LIBRARY
        try:
            cann.build_npu_kernels(home, ROOT / "csrc" / "npu", library, cmake, os.environ)
        except cann.CannotBuild as error:
            self.warn(
                f"{error}\nnpuzero is installed without kernels for the NPU: `npuzero build-npu` compiles them later"
            )


class CopySources(build_py):
    """The npu kernels' sources go with the package: `npuzero build-npu` compiles them on the machine with CANN."""

    def run(self) -> None:
        super().run()
        if not self.editable_mode:
            inside = Path(self.build_lib) / "npuzero" / "csrc" / "npu"
            shutil.copytree(ROOT / "csrc" / "npu", inside, dirs_exist_ok=True, ignore=shutil.ignore_patterns("host"))


setup(ext_modules=[Extension("npuzero._C", sources=[])], cmdclass={"build_ext": CMakeBuild, "build_py": CopySources})
