"""`npuzero build-npu` with a CANN that compiles for the emulator: both ways, the cache, what can be missing."""

from __future__ import annotations

import ctypes
import shutil
from pathlib import Path

import pytest

from npu.fake import libraries
from npuzero import config
from npuzero.cli import main
from npuzero.device import kernels

CANN = libraries.HERE / "cann"
NAMES = ("cast", "flat_adam", "norm", "norm_finish", "pack")


@pytest.fixture
def cann(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A CANN of its own, to be changed; a user's cache of its own, too."""
    folder = tmp_path / "fake" / "cann"
    shutil.copytree(CANN, folder)
    monkeypatch.setenv("ASCEND_HOME_PATH", str(folder))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return folder


def run(*arguments: object, capsys: pytest.CaptureFixture[str]) -> tuple[int, str]:
    status = main(["build-npu", *map(str, arguments)])
    output = capsys.readouterr()
    return status, output.out + output.err


@pytest.mark.slow
@pytest.mark.parametrize(("version", "part"), [("8.1.RC1", "compiler"), ("9.0.0", "bin")])
def test_both_ways_of_building_leave_the_same_entries(version, part, tmp_path, monkeypatch, capsys):
    libraries.build()
    folder = tmp_path / "cann"
    (folder / "x").mkdir(parents=True)
    (folder / part).symlink_to(CANN / part)  # what the other way needs is not there
    (folder / "x" / "ascend_toolkit_install.info").write_text(f"version={version}\n")
    (folder / "x" / "version.info").write_text("Version=7.6.0.1.220\n")  # a component's own
    monkeypatch.setenv("ASCEND_HOME_PATH", str(folder))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    assert kernels.find() is None
    status, text = run(capsys=capsys)
    assert status == 0 and f"built with CANN {version}" in text, text
    found = kernels.find()
    assert found is not None and version in str(found)
    ctypes.CDLL(str(libraries.BUILT / "libascendcl.so"), mode=ctypes.RTLD_GLOBAL)
    library = ctypes.CDLL(str(found))
    assert all(hasattr(library, f"aclrtlaunch_npuzero_{name}") for name in NAMES)
    assert run(capsys=capsys)[1].startswith("there already")


def test_a_compiler_that_fails_is_quoted(cann, capsys):
    (cann / "bin" / "bisheng").write_text("#!/bin/sh\necho the first error >&2; exit 1\n")
    status, text = run(capsys=capsys)
    assert status == 2 and "KernelUnavailable" in text and "the first error" in text
    assert kernels.find() is None


def test_an_old_cann_is_refused(cann, capsys):
    (cann / "fake-linux" / "ascend_toolkit_install.info").write_text("version=8.0.0\n")
    status, text = run(capsys=capsys)
    assert status == 2 and "need CANN 8.1 or later; found 8.0" in text


def test_without_cann_it_says_so(tmp_path, monkeypatch, capsys):
    monkeypatch.delenv("ASCEND_HOME_PATH", raising=False)
    monkeypatch.delenv("ASCEND_TOOLKIT_HOME", raising=False)
    monkeypatch.setattr(config, "_TOOLKITS", {"cann": (("ASCEND_HOME_PATH",), str(tmp_path / "none"), "*")})
    status, text = run(capsys=capsys)
    assert status == 2 and "expected CANN 8.1 or later" in text


def test_a_library_can_be_named(tmp_path, monkeypatch):
    monkeypatch.setenv("NPUZERO_NPU_KERNELS", str(tmp_path / "none.so"))
    with pytest.raises(config.ConfigError, match="NPUZERO_NPU_KERNELS"):
        kernels.find()
    (tmp_path / "none.so").touch()
    assert kernels.find() == tmp_path / "none.so"


def test_a_changed_source_is_another_library(cann, tmp_path, monkeypatch):
    toolkit = config.find_toolkit("cann")
    before = kernels.cached(toolkit)
    copied = tmp_path / "npu"
    shutil.copytree(kernels.sources(), copied)
    monkeypatch.setattr(kernels, "sources", lambda: copied)
    assert kernels.cached(toolkit) == before
    (copied / "cast.cpp").write_text((copied / "cast.cpp").read_text() + "\n")
    assert kernels.cached(toolkit) != before
