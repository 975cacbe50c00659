"""Caps on memory: the kernel's, or none where it makes no control group."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from npuzero.bench import group as groups


@pytest.mark.parametrize("place", ["nowhere", "."])
def test_where_no_group_can_be_made_there_is_none(place: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A folder that is no control group has no files of the kernel's, and none are put there."""
    monkeypatch.setattr(groups, "GROUPS", [(tmp_path / place, limits) for _, limits in groups.GROUPS])
    with groups.open_control_group(1 << 30) as made:
        assert made is None
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("later", [False, True])
def test_the_kernel_ends_what_takes_more_than_its_cap(later: bool) -> None:
    cap = 64 << 20
    with groups.open_control_group() if later else groups.open_control_group(cap) as made:
        if made is None:
            pytest.skip("this process may make no control group")
        if later:
            made.limit(cap)
        for megabytes, ended in ((16, 0), (256, -9)):
            program = f"held = bytearray({megabytes} << 20)"
            assert subprocess.run(made.command([sys.executable, "-c", program]), timeout=300).returncode == ended
        assert made.used() < cap
    assert not made.folder.exists()
