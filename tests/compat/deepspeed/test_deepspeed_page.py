"""The page shows what the command prints."""

from __future__ import annotations

import re
from pathlib import Path

from npuzero.cli import main

PAGE = (Path(__file__).resolve().parents[3] / "docs" / "deepspeed.md").read_text("utf-8")


def test_the_table_is_what_the_command_prints(tmp_path, monkeypatch, capsys):
    (configuration,) = re.findall(r"^```json\n(.*?)^```", PAGE, re.DOTALL | re.MULTILINE)
    (table,) = re.findall(r"^```text\n(.*?)^```", PAGE, re.DOTALL | re.MULTILINE)
    (tmp_path / "ds_config.json").write_text(configuration, "utf-8")
    (command,) = re.findall(r"^`npuzero (config explain [^`]+)` prints:", PAGE, re.MULTILINE)
    monkeypatch.chdir(tmp_path)
    assert main(command.split()) == 0
    assert capsys.readouterr().out == table
