"""CANN's version is read from one file, and ordered; which torch_npu goes with it is told as torch_npu's table does."""

from __future__ import annotations

import random
import re
from pathlib import Path

import pytest

from npu.fake import libraries
from npuzero import cann

ROOT = Path(__file__).resolve().parents[2]
MACHINES = ("aarch64", "x86_64")


def write_cann_info(root: Path, machine: str, version: str) -> None:
    folder = root / f"{machine}-linux"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "ascend_toolkit_install.info").write_text(
        f"package_name=Ascend-cann-toolkit\ncompatible_version=[V100R001C15]\ninnerversion=V100\nversion={version}\n"
    )


@pytest.mark.parametrize("machine", MACHINES)
@pytest.mark.parametrize("version", ["8.3.RC1", "8.5.0.alpha002", "9.0.0-beta.1", "9.1.0"])
@pytest.mark.parametrize("layout", libraries.LAYOUTS)
def test_of_many_files_one_tells_the_version(machine, version, layout, tmp_path, monkeypatch):
    monkeypatch.setattr(libraries, "MACHINE", f"{machine}-linux")
    root = libraries.make_cann_folder(tmp_path, version, layout)
    write_cann_info(root, machine, version)
    assert cann.find_cann_version(root) == cann.find_cann_version(root, machine) == version
    for path in root.glob(f"{machine}-linux/ascend_toolkit_install.info"):
        path.unlink()
    (root / libraries.MACHINE / "ascend_toolkit_install.info").unlink(missing_ok=True)
    assert cann.find_cann_version(root, machine) is None  # and no other file's number


def test_a_machine_reads_its_own(tmp_path):
    for machine, version in zip(MACHINES, ("8.5.0", "9.0.0"), strict=True):
        write_cann_info(tmp_path, machine, version)
    assert [cann.find_cann_version(tmp_path, machine) for machine in MACHINES] == ["8.5.0", "9.0.0"]
    assert cann.find_cann_version(tmp_path, "riscv64") == "8.5.0"


def test_releases_are_in_order():
    releases = [
        *("8.0.RC3", "8.0.0", "8.1.RC1", "8.3.RC1.alpha002", "8.3.RC1.alpha003", "8.3.RC1", "8.3.RC2", "8.3.0"),
        *(
            "8.5.0.alpha001",
            "8.5.0",
            "8.5.1",
            "9.0.0-alpha.1",
            "9.0.0-beta.1",
            "9.0.0-beta.2",
            "9.0.0",
            "9.1.0",
            "10.0.0",
        ),
    ]
    shuffled = random.Random(0).sample(releases, len(releases))
    assert sorted(shuffled, key=cann.version_sort_key) == releases
    assert cann.version_sort_key("8.5") == cann.version_sort_key("8.5.0") and cann.version_sort_key(
        "2.9.0+git1a2b"
    ) == cann.version_sort_key("2.9.0")


@pytest.mark.parametrize(
    ("release", "way"),
    [
        ("8.3.RC1", "ascendc"),
        ("8.5.0", "ascendc"),
        ("9.0.0-beta.1", "bisheng"),
        ("9.1.0", "bisheng"),
        ("10.0", "bisheng"),
    ],
)
def test_the_way_is_the_release_s(release, way, tmp_path):
    assert cann.get_build_method(tmp_path, release) == way


def test_the_way_of_an_unknown_release_is_by_what_is_there(tmp_path):
    assert cann.get_build_method(tmp_path, None) == "bisheng"
    assert cann.get_build_method(libraries.make_cann_folder(tmp_path, layout="latest"), None) == "ascendc"


@pytest.mark.parametrize(
    ("package", "wanted"),
    [
        *(("2.8.0", "8.3.RC1"), ("2.8.0.post1", "8.3.RC1"), ("2.8.0.post2", "8.5.0"), ("2.8.0.post4", "9.0.0")),
        *(("2.9.0", "8.5.0"), ("2.9.0.post8", "9.1.0"), ("2.10.0", "9.0.0"), ("2.10.0.post6", "9.1.0")),
        *(("2.12.0", "9.1.0"), ("2.13.0", "9.1.0"), ("2.7.1", None), ("2.9.0rc1", None)),
    ],
)
def test_a_torch_npu_has_its_cann(package, wanted):
    assert cann.find_matching_cann(package) == wanted


def test_only_a_cann_that_is_too_old_is_a_mismatch():
    assert (
        cann.find_cann_mismatch("9.0.0", "2.13.0")["why"]
        == "torch_npu 2.13.0 is published for CANN 9.1.0, and this is 9.0.0"
    )
    assert "published for CANN 8.3.RC1" in cann.find_cann_mismatch("8.3.RC1.alpha002", "2.8.0")["why"]
    for release, package in (("8.3.RC1", "2.8.0"), ("9.1.0", "2.8.0"), (None, "2.13.0"), ("8.1.RC1", None)):
        assert cann.find_cann_mismatch(release, package) is None


def test_the_oldest_is_that_of_the_oldest_torch():
    requirement = re.search(r'"torch>=([\d.]+)"', (ROOT / "pyproject.toml").read_text())
    assert requirement and cann.find_matching_cann(requirement.group(1)) == cann.OLDEST


def test_the_extra_is_for_the_torch_that_is_tested():
    pinned = re.search(
        r'^npu = \["torch==([\d.]+)\*", "torch_npu==([\d.]+)\*"\]', (ROOT / "pyproject.toml").read_text(), re.M
    )
    tested = re.search(r"^TORCH \?= torch==(\S+)", (ROOT / "Makefile").read_text(), re.M)
    assert pinned and tested and pinned[1] == pinned[2] and tested[1].startswith(pinned[1])


def test_the_documented_table_is_this_one():
    rows = re.findall(
        r"^\| ([\d.]+) \| ([\w.]+) \| ([\w.]+) \| (\w+) \|", (ROOT / "docs/npu.md").read_text(), re.MULTILINE
    )
    table = tuple((package, release) for _, package, release, _ in rows)
    assert table == cann.PAIRS
    for torch, package, release, way in rows:
        assert package.startswith(f"{torch}.") and cann.get_build_method(ROOT, release) == way
