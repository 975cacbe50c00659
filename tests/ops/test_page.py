"""docs/adding-an-op.md against the code: what it names is there, and whatever names an op is named by it."""

from __future__ import annotations

import re
import subprocess

import pytest

from npuzero import _native
from packages import ROOT

PAGE = (ROOT / "docs/adding-an-op.md").read_text("utf-8")
PLACES = set(re.findall(r"`((?:[\w<>-]+/)*[\w<>-]+\.(?:h|cpp|cu|cuh|py|md))`", PAGE))
OWN = [place for place in PLACES if "<op>" in place and "npu/" not in place]


@pytest.mark.parametrize("op", sorted(_native.kernels()))
def test_an_op_has_the_six_files_of_its_own(op: str) -> None:
    assert len(OWN) == 6
    assert [place for place in OWN if not (ROOT / place.replace("<op>", op)).is_file()] == []


def test_every_file_on_the_page_is_there() -> None:
    known = {place for place in PLACES if "/" in place}
    known = {f"csrc/{place}" if place.startswith(("cpu/", "core/")) else place for place in known}
    known = {f"npuzero/{place}" if place.startswith("ops/") else place for place in known}
    assert len(known) > 40
    assert [place for place in sorted(known) if not (ROOT / place.replace("<op>", "flat_adam")).is_file()] == []


def test_every_file_that_names_an_op_is_on_the_page() -> None:
    files = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True)
    if files.returncode:
        pytest.skip("not a clone: which files there are is asked of git")
    named = {place.replace("<op>", "flat_lion") for place in PLACES}
    sources = [path for path in files.stdout.split() if re.search(r"\.(h|cpp|cu|cuh|py|txt)$", path)]
    assert len(sources) > 400
    words = {
        path: r"flat_lion|FlatLion|\bLion\b" if path.startswith("npuzero/") else "flat_lion|FlatLion"
        for path in sources
    }
    naming = {path for path, word in words.items() if re.search(word, (ROOT / path).read_text("utf-8"))}
    assert sorted(naming - named - {"tests/ops/test_page.py"}) == []
