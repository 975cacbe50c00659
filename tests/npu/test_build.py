"""`npuzero build-npu` with a CANN that compiles for the emulator: both ways and layouts, the cache, what is missing."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest

from npu.fake import libraries
from npuzero import cann as toolkits
from npuzero import config
from npuzero.cli import main
from npuzero.device import kernels
from npuzero.info import info

NAMES = ("cast", "dequantize_sum", "flat_adam", "flat_lion", "norm", "norm_finish", "pack", "quantize")


@pytest.fixture
def cann(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A CANN of its own, to be changed; a user's cache of its own, too."""
    folder = libraries.make_cann_folder(tmp_path / "Ascend" / "cann")
    monkeypatch.setenv("ASCEND_HOME_PATH", str(folder))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return folder


def run_build_npu(*arguments: object, capsys: pytest.CaptureFixture[str]) -> tuple[int, str]:
    status = main(["build-npu", *map(str, arguments)])
    output = capsys.readouterr()
    return status, output.out + output.err


def replace_cann_file(path: Path, script: str) -> None:
    """Puts a script of the test's in the place of a CANN's file, which is a link to one of this repository."""
    path.unlink()
    path.write_text(script)
    path.chmod(0o755)


# As the extension opens it, in a process in which nothing of CANN was loaded. A launch of a kernel that is not
# registered prints, and returns success.
OPEN = """
import ctypes, os, sys
library = ctypes.CDLL(sys.argv[1], mode=os.RTLD_NOW | os.RTLD_LOCAL)
entries = [getattr(library, f"aclrtlaunch_npuzero_{name}") for name in sys.argv[2:]]
print(entries[0](1, None, None))
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("version", "layout", "way"),
    [("8.3.RC1", "latest", "ascendc"), ("8.5.0", "cann", "ascendc"), ("9.0.0-beta.1", "cann", "bisheng")],
)
def test_both_ways_of_building_leave_the_same_entries(version, layout, way, tmp_path, monkeypatch, capsys):
    libraries.build_fake_cann()
    folder = libraries.make_cann_folder(tmp_path / "cann", version, layout)
    monkeypatch.setenv("ASCEND_HOME_PATH", str(folder))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("CMAKE_GENERATOR", "Ninja")  # what a user may prefer, and CANN's scripts cannot use
    assert kernels.find_library() is None
    status, text = run_build_npu(capsys=capsys)
    assert status == 0 and f"built with CANN {version}" in text and f"by {way}" in text, text
    assert "warning" not in text
    found = kernels.find_library()
    assert found is not None and version in str(found) and kernels.why_no_library() is None
    variables = os.environ | {"FAKE_CANN_UNREGISTERED": "1"}
    done = subprocess.run(
        [sys.executable, "-c", OPEN, str(found), *NAMES], env=variables, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert set(done.stdout.splitlines()) == {"a kernel is not registered", "0"}
    assert run_build_npu(capsys=capsys)[1].startswith("there already")


def test_a_library_that_does_not_load_is_a_warning(cann, capsys):
    replace_cann_file(
        cann / "bin" / "bisheng", '#!/bin/sh\nfor word; do last="$word"; done; echo no library > "$last"\n'
    )
    status, text = run_build_npu(capsys=capsys)
    assert status == 0 and "warning: it cannot be loaded here" in text and "file too short" in text


@pytest.mark.parametrize("flags", ["", "i"], ids=["", "under make -i"])
def test_a_compiler_that_fails_is_quoted(flags, cann, monkeypatch, capsys):
    monkeypatch.setenv("MAKEFLAGS", flags)
    replace_cann_file(cann / "bin" / "bisheng", "#!/bin/sh\necho; echo a.h:1: error: the first >&2; seq 1000; exit 1\n")
    status, text = run_build_npu(capsys=capsys)
    assert (
        status == 2 and "KernelUnavailable" in text and "a.h:1: error: the first\n1\n" in text and "\n999" not in text
    )
    assert kernels.find_library() is None
    assert str(toolkits.get_failure_file(kernels.cached_library_path(config.find_toolkit("cann")))) in text
    assert "\n999\n" in (kernels.why_no_library() or "")
    (missing,) = (item for item in info()["missing"] if item["what"] == "kernels for npu")
    assert "building them failed: the build failed: a.h:1: error: the first" in missing["why"]


def test_an_old_cann_is_refused(cann, capsys):
    (cann / libraries.MACHINE / "ascend_toolkit_install.info").write_text("version=8.2.RC1\n")
    status, text = run_build_npu(capsys=capsys)
    assert status == 2 and "need CANN 8.3.RC1 or later; found 8.2.RC1" in text


def test_a_cann_that_torch_npu_is_too_new_for_is_told(cann, monkeypatch, capsys):
    monkeypatch.setattr(metadata, "version", {"torch_npu": "2.12.0", "npuzero": "0", "torch": "2.12.0"}.__getitem__)
    target = kernels.cached_library_path(config.find_toolkit("cann"))
    target.parent.mkdir(parents=True)
    target.touch()
    status, text = run_build_npu(capsys=capsys)
    told = "torch_npu 2.12.0 is published for CANN 9.1.0, and this is 9.0.0"
    assert status == 0 and f"warning: {told}. Install that CANN" in text
    assert told in {item["why"] for item in info()["missing"]}


@pytest.mark.parametrize("name", ["Ascend310P3", "910B3", "Ascend910A"])
def test_a_processor_of_another_architecture_is_refused(name, cann, capsys):
    status, text = run_build_npu("--soc", name, capsys=capsys)
    assert status == 2 and "expected an Atlas A2 or A3" in text and f"got {name}" in text


@pytest.mark.parametrize("name", ["Ascend910B1", "Ascend910B4-1", "Ascend910B2C", "Ascend910_9392"])
def test_the_processor_is_handed_on(name, cann, capsys):
    (cann / libraries.MACHINE / "ascend_toolkit_install.info").write_text("version=8.5.0\n")
    replace_cann_file(
        cann / libraries.LAYOUTS["cann"]["ascendc.cmake"] / "ascendc.cmake",
        'message(FATAL_ERROR "it is ${SOC_VERSION}.")',
    )
    status, text = run_build_npu("--soc", name, capsys=capsys)
    assert status == 2 and f"it is {name}." in text


def test_without_cann_it_says_so(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(config, "TOOLKITS", {"cann": ((), (str(tmp_path / "none"),), toolkits.find_cann_version)})
    status, text = run_build_npu(capsys=capsys)
    assert status == 2 and "expected CANN 8.3.RC1 or later" in text


def test_a_library_can_be_named(tmp_path, monkeypatch):
    monkeypatch.setenv("NPUZERO_NPU_KERNELS", str(tmp_path / "none.so"))
    with pytest.raises(config.ConfigError, match="NPUZERO_NPU_KERNELS"):
        kernels.find_library()
    (tmp_path / "none.so").touch()
    assert kernels.find_library() == tmp_path / "none.so"


def test_what_was_built_for_this_cann_comes_before_the_installation(cann, tmp_path, monkeypatch):
    monkeypatch.setattr(kernels, "INSTALLED", tmp_path / "installed.so")
    kernels.INSTALLED.touch()
    assert kernels.find_library() == kernels.INSTALLED
    built = kernels.cached_library_path(config.find_toolkit("cann"))
    built.parent.mkdir(parents=True)
    built.touch()
    assert kernels.find_library() == built


def test_a_changed_source_is_another_library(cann, tmp_path, monkeypatch):
    toolkit = config.find_toolkit("cann")
    before = kernels.cached_library_path(toolkit)
    copied = tmp_path / "npu"
    shutil.copytree(kernels.kernel_sources(), copied)
    monkeypatch.setattr(kernels, "kernel_sources", lambda: copied)
    assert kernels.cached_library_path(toolkit) == before
    (copied / "cast.cpp").write_text((copied / "cast.cpp").read_text() + "\n")
    assert kernels.cached_library_path(toolkit) != before
