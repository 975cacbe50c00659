"""Each example has a page that names its files, and whose commands have options that its scripts know."""

from __future__ import annotations

import re

import pytest

from examples.pages import ROOT

FOLDERS = sorted(path for path in (ROOT / "examples").iterdir() if any(path.glob("*.py")))


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.name)
def test_the_readme_is_that_of_the_scripts(folder) -> None:
    page = (folder / "README.md").read_text("utf-8")
    for script in folder.glob("*.py"):
        assert f"`{script.name}`" in page, f"{script.name} is not told of"
    commands = re.findall(rf"^ *((?:python|torchrun) .*examples/{folder.name}/(\w+\.py).*)$", page, re.MULTILINE)
    assert any("torchrun" in line for line, _ in commands) and any("torchrun" not in line for line, _ in commands)
    for line, script in commands:
        source = (folder / script).read_text("utf-8")
        for option in re.findall(r"--([\w-]+)", line.partition(script)[2]):
            known = f'"--{option}"' in source or f"    {option.replace('-', '_')}: " in source
            assert known, f"{script} has no --{option}"
